package wire

import (
	"encoding/binary"
	"fmt"
	"math"
)

// maxDepth bounds arrays and maps within each other.
const maxDepth = 16

// Leading bytes of MessagePack values. Small integers, strings, arrays and maps have their
// value or length in the leading byte.
const (
	msgNil     = 0xc0
	msgFalse   = 0xc2
	msgTrue    = 0xc3
	msgBin8    = 0xc4
	msgBin16   = 0xc5
	msgBin32   = 0xc6
	msgExt8    = 0xc7
	msgExt16   = 0xc8
	msgExt32   = 0xc9
	msgFloat32 = 0xca
	msgFloat64 = 0xcb
	msgUint8   = 0xcc
	msgUint16  = 0xcd
	msgUint32  = 0xce
	msgUint64  = 0xcf
	msgInt8    = 0xd0
	msgInt16   = 0xd1
	msgInt32   = 0xd2
	msgInt64   = 0xd3
	msgFixExt1 = 0xd4 // to 0xd8, of 1, 2, 4, 8 and 16 bytes
	msgFixExt5 = 0xd8
	msgStr8    = 0xd9
	msgStr16   = 0xda
	msgStr32   = 0xdb
	msgArray16 = 0xdc
	msgArray32 = 0xdd
	msgMap16   = 0xde
	msgMap32   = 0xdf
)

// msgpackReader reads MessagePack values from memory. After an error, which err keeps, the
// rest of the input counts as empty and all methods return zero values.
type msgpackReader struct {
	rest []byte
	err  error
}

// fail keeps the first error.
func (r *msgpackReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
	r.rest = nil
}

// take returns the next n bytes, which are those of the input.
func (r *msgpackReader) take(n int) []byte {
	if n > len(r.rest) {
		r.fail("the input ends within a value")
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

// uint returns the next n bytes as an unsigned integer.
func (r *msgpackReader) uint(n int) uint64 {
	var v uint64
	for _, b := range r.take(n) {
		v = v<<8 | uint64(b)
	}
	return v
}

// peek returns the leading byte of the next value, or nil's if there is none.
func (r *msgpackReader) peek() byte {
	if len(r.rest) == 0 {
		r.fail("the input ends before a value")
		return msgNil
	}
	return r.rest[0]
}

// isNil consumes the next value if it is nil.
func (r *msgpackReader) isNil() bool {
	if r.peek() != msgNil {
		return false
	}
	r.take(1)
	return true
}

func isArray(lead byte) bool { return lead&0xf0 == 0x90 || lead == msgArray16 || lead == msgArray32 }

func isMap(lead byte) bool { return lead&0xf0 == 0x80 || lead == msgMap16 || lead == msgMap32 }

func isBytes(lead byte) bool {
	return lead&0xe0 == 0xa0 || lead >= msgBin8 && lead <= msgBin32 || lead >= msgStr8 && lead <= msgStr32
}

func isInteger(lead byte) bool {
	return lead < 0x80 || lead >= 0xe0 || lead >= msgUint8 && lead <= msgInt64
}

// arrayLen returns the number of elements of an array, 0 for nil. There are no more than bytes
// are left, so that a caller may allocate for them.
func (r *msgpackReader) arrayLen() int {
	var n uint64
	switch lead := r.peek(); {
	case lead == msgNil:
		r.take(1)
	case lead&0xf0 == 0x90:
		n = uint64(lead & 0x0f)
		r.take(1)
	case lead == msgArray16:
		r.take(1)
		n = r.uint(2)
	case lead == msgArray32:
		r.take(1)
		n = r.uint(4)
	default:
		r.fail("expected an array, found a value of type %#x", lead)
	}
	return r.bounded(n)
}

// mapLen returns the number of pairs of a map.
func (r *msgpackReader) mapLen() int {
	var n uint64
	switch lead := r.peek(); {
	case lead&0xf0 == 0x80:
		n = uint64(lead & 0x0f)
		r.take(1)
	case lead == msgMap16:
		r.take(1)
		n = r.uint(2)
	case lead == msgMap32:
		r.take(1)
		n = r.uint(4)
	default:
		r.fail("expected a map, found a value of type %#x", lead)
	}
	return r.bounded(n)
}

// bounded returns n, which is an error if the rest of the input cannot hold so many values.
func (r *msgpackReader) bounded(n uint64) int {
	if n > uint64(len(r.rest)) {
		r.fail("%d elements declared, with %d bytes left", n, len(r.rest))
		return 0
	}
	return int(n)
}

// bytes returns the content of a string or of binary data, which is that of the input.
func (r *msgpackReader) bytes() []byte {
	lead := r.peek()
	if !isBytes(lead) {
		r.fail("expected a string or bytes, found a value of type %#x", lead)
		return nil
	}
	r.take(1)
	switch lead {
	case msgBin8, msgStr8:
		return r.take(r.bounded(r.uint(1)))
	case msgBin16, msgStr16:
		return r.take(r.bounded(r.uint(2)))
	case msgBin32, msgStr32:
		return r.take(r.bounded(r.uint(4)))
	}
	return r.take(int(lead & 0x1f))
}

// integer returns an integer of any encoding, a negative one in two's complement.
func (r *msgpackReader) integer() uint64 {
	lead := r.peek()
	if !isInteger(lead) {
		r.fail("expected an integer, found a value of type %#x", lead)
		return 0
	}
	r.take(1)
	switch lead {
	case msgUint8:
		return r.uint(1)
	case msgUint16:
		return r.uint(2)
	case msgUint32:
		return r.uint(4)
	case msgUint64, msgInt64:
		return r.uint(8)
	case msgInt8:
		return uint64(int8(r.uint(1)))
	case msgInt16:
		return uint64(int16(r.uint(2)))
	case msgInt32:
		return uint64(int32(r.uint(4)))
	}
	return uint64(int8(lead))
}

// count returns an integer from 0 to limit.
func (r *msgpackReader) count(limit int) int {
	v := r.integer()
	if v > uint64(limit) {
		r.fail("expected an integer from 0 to %d, found %d", limit, int64(v))
		return 0
	}
	return int(v)
}

// float returns a floating-point number of either size.
func (r *msgpackReader) float() float64 {
	switch lead := r.peek(); lead {
	case msgFloat32:
		r.take(1)
		return float64(math.Float32frombits(uint32(r.uint(4))))
	case msgFloat64:
		r.take(1)
		return math.Float64frombits(r.uint(8))
	default:
		r.fail("expected a floating-point number, found a value of type %#x", lead)
		return 0
	}
}

// skip passes over one value of any type, in which depth more levels of arrays and maps may lie.
func (r *msgpackReader) skip(depth int) {
	switch lead := r.peek(); {
	case isArray(lead), isMap(lead):
		if depth == 0 {
			r.fail("more than %d levels of arrays and maps", maxDepth)
			return
		}
		n := 0
		if isArray(lead) {
			n = r.arrayLen()
		} else {
			n = 2 * r.mapLen()
		}
		for range n {
			if r.skip(depth - 1); r.err != nil {
				return
			}
		}
	case isBytes(lead):
		r.bytes()
	case isInteger(lead):
		r.integer()
	case lead == msgFloat32, lead == msgFloat64:
		r.float()
	case lead == msgNil, lead == msgFalse, lead == msgTrue:
		r.take(1)
	case lead >= msgFixExt1 && lead <= msgFixExt5:
		r.take(2 + 1<<(lead-msgFixExt1)) // its type is a byte
	case lead >= msgExt8 && lead <= msgExt32:
		r.take(1)
		r.take(1 + r.bounded(r.uint(1<<(lead-msgExt8))))
	default:
		r.fail("%#x begins no value", lead)
	}
}

// appendTokens appends the integers of an array, the low 32 bits of each.
func (r *msgpackReader) appendTokens(to []uint32) []uint32 {
	n := r.arrayLen()
	for range n {
		// The cases of nearly all token ids, without calls.
		switch b := r.rest; {
		case len(b) >= 3 && b[0] == msgUint16:
			to = append(to, uint32(b[1])<<8|uint32(b[2]))
			r.rest = b[3:]
		case len(b) >= 1 && b[0] < 0x80:
			to = append(to, uint32(b[0]))
			r.rest = b[1:]
		case len(b) >= 5 && b[0] == msgUint32:
			to = append(to, binary.BigEndian.Uint32(b[1:]))
			r.rest = b[5:]
		default:
			if to = append(to, uint32(r.integer())); r.err != nil {
				return to
			}
		}
	}
	return to
}
