// Package wire describes compact binary formats. A Coder either writes or reads, so that one function
// states a format for both directions, with the bounds of what is read.
package wire

import (
	"encoding/binary"
	"math"
)

// MaxNameBytes bounds the length of a name. Longer ones are truncated when they are written.
const MaxNameBytes = 4 << 10

// Coder writes values to Data, or reads them from it. A value that is damaged or beyond its bounds makes
// a Coder that reads return zeros from then on; see Damaged. The zero value writes.
type Coder struct {
	Data []byte // what was written, or what is yet to be read

	reading, damaged bool
	names            []string // of the table
	numbers          map[string]uint64
	nameBytes        int // of a table that is written, about
}

// NewReader returns a Coder that reads data.
func NewReader(data []byte) Coder { return Coder{Data: data, reading: true} }

// Reads reports whether the Coder reads.
func (c *Coder) Reads() bool { return c.reading }

// Damaged reports whether a value was damaged or beyond its bounds.
func (c *Coder) Damaged() bool { return c.damaged }

// Fail makes the Coder damaged.
func (c *Coder) Fail() { c.damaged = true }

// Len returns about how many bytes were written, the table of names included.
func (c *Coder) Len() int { return len(c.Data) + c.nameBytes }

// Reset empties a Coder that writes, which keeps its memory.
func (c *Coder) Reset() {
	clear(c.names)
	clear(c.numbers)
	*c = Coder{Data: c.Data[:0], names: c.names[:0], numbers: c.numbers}
}

type number interface {
	~int | ~int8 | ~int64 | ~uint8 | ~uint32 | ~uint64 | ~float64
}

// Number codes an integer from 0 to most as a uvarint. Numbers beyond the bounds are written as the
// nearest bound; fractions are truncated.
func Number[T number](c *Coder, n *T, most T) {
	if !c.reading {
		c.Data = binary.AppendUvarint(c.Data, uint64(min(max(0, *n), most)))
		return
	}
	*n = 0
	if x := c.uvarint(); x > uint64(most) {
		c.damaged = true
	} else {
		*n = T(x)
	}
}

func (c *Coder) uvarint() uint64 {
	n, size := binary.Uvarint(c.Data)
	return advance(c, n, size)
}

// advance skips the size bytes of a number n, and returns n.
func advance[T int64 | uint64](c *Coder, n T, size int) T {
	if c.damaged || size <= 0 {
		c.damaged = true
		return 0
	}
	c.Data = c.Data[size:]
	return n
}

// Varint codes any integer.
func (c *Coder) Varint(n *int64) {
	if !c.reading {
		c.Data = binary.AppendVarint(c.Data, *n)
		return
	}
	x, size := binary.Varint(c.Data)
	*n = advance(c, x, size)
}

// Uint64 codes a number in 8 bytes.
func (c *Coder) Uint64(n *uint64) {
	if !c.reading {
		c.Data = binary.LittleEndian.AppendUint64(c.Data, *n)
		return
	}
	*n = 0
	if b := c.next(8); b != nil {
		*n = binary.LittleEndian.Uint64(b)
	}
}

// Float64 codes a number in 8 bytes.
func (c *Coder) Float64(x *float64) {
	bits := math.Float64bits(*x)
	c.Uint64(&bits)
	*x = math.Float64frombits(bits)
}

// Share codes a number from 0 to 1 in 4 bytes.
func (c *Coder) Share(x *float64) {
	if !c.reading {
		c.Data = binary.LittleEndian.AppendUint32(c.Data, math.Float32bits(float32(min(max(0, *x), 1))))
		return
	}
	*x = 0
	if b := c.next(4); b != nil {
		*x = float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	}
	if !(*x >= 0 && *x <= 1) {
		*x, c.damaged = 0, true
	}
}

// Flags codes up to eight booleans in a byte.
func (c *Coder) Flags(flags ...*bool) {
	var bits uint8
	for i, f := range flags {
		if *f {
			bits |= 1 << i
		}
	}
	Number(c, &bits, 1<<len(flags)-1)
	for i, f := range flags {
		*f = bits&(1<<i) != 0
	}
}

// Bytes codes n bytes. What is read shares memory with Data, and is nil if there are too few.
func (c *Coder) Bytes(b *[]byte, n int) {
	if !c.reading {
		c.Data = append(c.Data, (*b)[:n]...)
		return
	}
	*b = c.next(n)
}

// next returns the next n bytes, nil if there are fewer.
func (c *Coder) next(n int) []byte {
	if c.damaged || n > len(c.Data) {
		c.damaged = true
		return nil
	}
	b := c.Data[:n:n]
	c.Data = c.Data[n:]
	return b
}

// Text codes a string of at most maxBytes; a longer one is truncated when it is written.
func (c *Coder) Text(s *string, maxBytes int) {
	if !c.reading {
		c.Data = appendText(c.Data, (*s)[:min(len(*s), maxBytes)])
		return
	}
	*s = string(c.next(c.Count(0, maxBytes, 1)))
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// Count codes the number of things that follow, n of them if it writes, and returns it. There are at most
// limit of them, each of minSize bytes at least: what is read is bounded by what Data can hold.
func (c *Coder) Count(n, limit, minSize int) int {
	Number(c, &n, limit)
	if c.reading && n > len(c.Data)/minSize {
		c.damaged = true
		return 0
	}
	return n
}

// AddName adds a name to the table that AppendNames writes, and returns its number there.
func (c *Coder) AddName(name string) uint64 {
	name = name[:min(len(name), MaxNameBytes)]
	n, known := c.numbers[name]
	if !known {
		if c.numbers == nil {
			c.numbers = map[string]uint64{}
		}
		n = uint64(len(c.names))
		c.numbers[name] = n
		c.names = append(c.names, name)
		c.nameBytes += len(name) + 2
	}
	return n
}

// AppendNames appends the table of names to b. ReadNames has to read it before the first Name.
func (c *Coder) AppendNames(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(c.names)))
	for _, name := range c.names {
		b = appendText(b, name)
	}
	return b
}

// ReadNames reads a table of at most limit names.
func (c *Coder) ReadNames(limit int) {
	c.names = make([]string, c.Count(0, limit, 1))
	for i := range c.names {
		c.Text(&c.names[i], MaxNameBytes)
	}
}

// Name codes a string by its number in the table of names, which it is added to if it is written.
func (c *Coder) Name(s *string) {
	if !c.reading {
		c.Data = binary.AppendUvarint(c.Data, c.AddName(*s))
		return
	}
	*s = ""
	if n := c.uvarint(); n < uint64(len(c.names)) {
		*s = c.names[n]
	} else {
		c.damaged = true
	}
}
