package wire

import (
	"bytes"
	"math"
	"strings"
	"testing"
)

// sample has a value of each kind.
type sample struct {
	count      int
	big        uint64
	signed     int64
	fixed      uint64
	float      float64
	share      float64
	first, set bool
	raw        []byte
	text, name string
}

func (s *sample) code(c *Coder) {
	s.count = c.Count(s.count, 100, 1)
	Number(c, &s.big, math.MaxUint64)
	c.Varint(&s.signed)
	c.Uint64(&s.fixed)
	c.Float64(&s.float)
	c.Share(&s.share)
	c.Flags(&s.first, &s.set)
	c.Bytes(&s.raw, 3)
	c.Text(&s.text, 5)
	c.Name(&s.name)
}

func TestRoundTrip(t *testing.T) {
	want := sample{3, math.MaxUint64, -7, 1 << 63, -1.5, 0.25, false, true, []byte("abc"), "hello", "name"}
	var w Coder
	written := want
	written.code(&w)
	data := append(w.AppendNames(nil), w.Data...)
	if w.Len() < len(data)-2 {
		t.Errorf("Len is %d for %d bytes", w.Len(), len(data))
	}
	for n := range len(data) + 1 {
		r := NewReader(data[:n])
		r.ReadNames(10)
		var got sample
		got.code(&r)
		if damaged := n < len(data); r.Damaged() != damaged {
			t.Errorf("%d of %d bytes: damaged is %v", n, len(data), r.Damaged())
		}
		if n < len(data) {
			continue
		}
		if !bytes.Equal(got.raw, want.raw) {
			t.Errorf("read %q, want %q", got.raw, want.raw)
		}
		got.raw, want.raw = nil, nil
		if got.name != want.name || got.text != want.text || got.big != want.big || got.signed != want.signed || got.fixed != want.fixed ||
			got.float != want.float || got.share != want.share || got.first || !got.set || got.count != want.count {
			t.Errorf("read %+v, want %+v", got, want)
		}
	}
}

func TestBounds(t *testing.T) {
	var w Coder
	for _, n := range []int{-5, 7, 1000} {
		Number(&w, &n, 10)
	}
	share, text := 2.0, "longer"
	w.Share(&share)
	w.Text(&text, 4)
	long := strings.Repeat("x", MaxNameBytes+1)
	w.Name(&long)
	r := NewReader(append(w.AppendNames(nil), w.Data...))
	r.ReadNames(1)
	for _, want := range []int{0, 7, 10} {
		var got int
		if Number(&r, &got, 10); got != want {
			t.Errorf("read %d, want %d", got, want)
		}
	}
	r.Share(&share)
	r.Text(&text, 4)
	if r.Name(&long); share != 1 || text != "long" || len(long) != MaxNameBytes || r.Damaged() || len(r.Data) > 0 {
		t.Errorf("read %v, %q and a name of %d bytes; damaged is %v, %d bytes are left", share, text, len(long), r.Damaged(), len(r.Data))
	}

	for name, read := range map[string]func(*Coder){
		"number":        func(c *Coder) { n := 0; Number(c, &n, 4) },
		"count":         func(c *Coder) { c.Count(0, 4, 1) },
		"size of count": func(c *Coder) { c.Count(0, 100, 2) },
		"text":          func(c *Coder) { c.Text(&text, 4) },
		"name":          func(c *Coder) { c.Name(&text) },
		"share":         func(c *Coder) { c.Share(&share) },
	} {
		r := NewReader([]byte{5, 0, 0, 0x7f, 0, 0, 0, 0, 0})
		if read(&r); !r.Damaged() {
			t.Errorf("%s beyond its bound is not noticed", name)
		}
		var after uint64
		if r.Uint64(&after); after != 0 {
			t.Errorf("%s: read %d after damage", name, after)
		}
	}
}
