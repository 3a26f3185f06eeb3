package wire

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// maxDepth bounds arrays and maps within each other.
const maxDepth = 16

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

// read returns the next value, as one of msgp's functions reads it.
func read[T any](r *msgpackReader, read func([]byte) (T, []byte, error)) (v T) {
	v, rest, err := read(r.rest)
	if r.rest = rest; err != nil {
		var zero T
		r.fail("%w", err)
		return zero
	}
	return v
}

func (r *msgpackReader) nextType() msgp.Type { return msgp.NextType(r.rest) }

// isNil consumes the next value if it is nil.
func (r *msgpackReader) isNil() bool {
	if !msgp.IsNil(r.rest) {
		return false
	}
	r.rest = r.rest[1:]
	return true
}

// isText reports whether the next value is a string or binary data.
func (r *msgpackReader) isText() bool {
	t := r.nextType()
	return t == msgp.StrType || t == msgp.BinType
}

// text returns the content of a string or of binary data, which is that of the input.
func (r *msgpackReader) text() []byte {
	if r.nextType() == msgp.BinType {
		return read(r, msgp.ReadBytesZC)
	}
	return read(r, msgp.ReadStringZC)
}

// arrayLen returns the number of elements of an array, 0 for nil. There are no more than bytes
// are left, so that a caller may allocate for them.
func (r *msgpackReader) arrayLen() int {
	if r.isNil() {
		return 0
	}
	return r.bounded(read(r, msgp.ReadArrayHeaderBytes))
}

// mapLen returns the number of pairs of a map.
func (r *msgpackReader) mapLen() int { return r.bounded(read(r, msgp.ReadMapHeaderBytes)) }

// bounded returns n, which is an error if the rest of the input cannot hold so many values.
func (r *msgpackReader) bounded(n uint32) int {
	if uint64(n) > uint64(len(r.rest)) {
		r.fail("%d elements declared, with %d bytes left", n, len(r.rest))
		return 0
	}
	return int(n)
}

// integer returns an integer of any encoding, a negative one in two's complement.
func (r *msgpackReader) integer() uint64 {
	if v, rest, err := msgp.ReadUint64Bytes(r.rest); err == nil {
		r.rest = rest
		return v
	}
	return uint64(read(r, msgp.ReadInt64Bytes))
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

// skip passes over one value of any type, in which depth more levels of arrays and maps may lie.
func (r *msgpackReader) skip(depth int) {
	n := 0
	switch r.nextType() {
	case msgp.ArrayType:
		n = r.arrayLen()
	case msgp.MapType:
		n = 2 * r.mapLen()
	default:
		rest, err := msgp.Skip(r.rest)
		if r.rest = rest; err != nil {
			r.fail("%w", err)
		}
		return
	}
	if depth == 0 {
		r.fail("more than %d levels of arrays and maps", maxDepth)
	}
	for ; n > 0 && r.err == nil; n-- {
		r.skip(depth - 1)
	}
}
