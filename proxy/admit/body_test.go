package admit

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func TestBodyPoolRead(t *testing.T) {
	const each, total = 1 << 20, 4 << 20
	cases := []struct {
		name         string
		size, length int
		want         error
		held         int64 // by the buffer
	}{
		{"empty", 0, 0, nil, 4 << 10},
		{"one byte", 1, 1, nil, 4 << 10},
		{"exact fit of the smallest", 4 << 10, 4 << 10, nil, 4 << 10},
		{"one more", 4<<10 + 1, 4<<10 + 1, nil, 8 << 10},
		{"trusted length", 64 << 10, 64 << 10, nil, 64 << 10},
		{"beyond the trusted length", 64<<10 + 1, 64<<10 + 1, nil, 128 << 10},
		{"claimed large, came small", 10, 1 << 20, nil, 64 << 10},
		{"unknown length, fits the smallest", 4 << 10, -1, nil, 4 << 10},
		{"unknown length, grows once", 4<<10 + 1, -1, nil, 16 << 10},
		{"unknown length, grows twice", 16<<10 + 1, -1, nil, 64 << 10},
		{"the limit", each, each, nil, each},
		{"the limit, unknown length", each, -1, nil, each},
		{"over the limit, said so", each + 1, each + 1, ErrBodyTooLarge, 0},
		{"over the limit, unknown length", each + 1, -1, ErrBodyTooLarge, each},
		{"10 GB said", 10, 10 << 30, ErrBodyTooLarge, 0},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b := NewBodyPool(new(Tenants))
			body := bytes.Repeat([]byte("abcdefg"), c.size/7+1)[:c.size]
			for how, from := range map[string]io.Reader{
				"all at once": bytes.NewReader(body), "halves": iotest.HalfReader(bytes.NewReader(body)),
				"end with the last bytes": iotest.DataErrReader(bytes.NewReader(body)),
			} {
				got, err := b.ReadBody(from, int64(c.length), Tenant{}, BodyLimits{each, total})
				if !errors.Is(err, c.want) || b.tenants.BodyBytesInUse() != c.held {
					t.Errorf("%s: error %v, %d bytes held, want %v, %d", how, err, b.tenants.BodyBytesInUse(), c.want, c.held)
				}
				if err == nil && !bytes.Equal(got, body) {
					t.Errorf("%s: the body was changed", how)
				}
				b.ReleaseBuffer(got, Tenant{})
				if held := b.tenants.BodyBytesInUse(); held != 0 {
					t.Errorf("%s: %d bytes still held", how, held)
				}
			}
		})
	}
}

func TestBodyMemoryLimit(t *testing.T) {
	b, most := NewBodyPool(new(Tenants)), BodyLimits{1 << 20, 140 << 10}
	var got [][]byte
	for range 2 {
		buf, err := b.ReadBody(bytes.NewReader(make([]byte, 64<<10)), 64<<10, Tenant{}, most)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, buf)
	}
	small, err := b.ReadBody(bytes.NewReader(make([]byte, 9<<10)), -1, Tenant{}, most) // 4 KiB, and has to grow
	if !errors.Is(err, ErrBodyMemory) {
		t.Errorf("error %v", err)
	}
	b.ReleaseBuffer(small, Tenant{})
	b.ReleaseBuffer(got[0], Tenant{})
	if buf, err := b.ReadBody(bytes.NewReader(make([]byte, 9<<10)), -1, Tenant{}, most); err != nil {
		t.Errorf("with room again: %v", err)
	} else {
		b.ReleaseBuffer(buf, Tenant{})
	}
	b.ReleaseBuffer(got[1], Tenant{})
	if b.tenants.BodyBytesInUse() != 0 {
		t.Errorf("%d bytes still held", b.tenants.BodyBytesInUse())
	}
}

func TestBodyPoolReadError(t *testing.T) {
	b := NewBodyPool(new(Tenants))
	buf, err := b.ReadBody(io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(io.ErrUnexpectedEOF)), 10, Tenant{},
		BodyLimits{1 << 20, 1 << 20})
	if err != io.ErrUnexpectedEOF || string(buf) != "abc" {
		t.Errorf("got %q, %v", buf, err)
	}
	b.ReleaseBuffer(buf, Tenant{})
	b.ReleaseBuffer(nil, Tenant{})
	if b.tenants.BodyBytesInUse() != 0 {
		t.Errorf("%d bytes still held", b.tenants.BodyBytesInUse())
	}
}

func TestBodyRateDeadline(t *testing.T) {
	type part struct {
		at    time.Duration
		bytes int
	}
	const s = time.Second
	for name, c := range map[string]struct {
		parts    []part
		min, max time.Duration // of the deadline
	}{
		"nothing":                   {nil, 30 * s, 30 * s},
		"too little for the window": {[]part{{0, 30<<10 - 1}}, 30 * s, 30 * s},
		"just enough":               {[]part{{0, 30 << 10}}, 30 * s, 32 * s},
		"much at once buys no more": {[]part{{s, 16 << 20}}, 31 * s, 33 * s},
		"then a byte at a time":     {[]part{{s, 16 << 20}, {29 * s, 1}}, 31 * s, 33 * s},
		"half the rate after much":  {[]part{{0, 16 << 20}, {10 * s, 5 << 10}, {20 * s, 5 << 10}}, 30 * s, 32 * s},
		"at the rate":               {[]part{{0, 10 << 10}, {10 * s, 10 << 10}, {20 * s, 10 << 10}, {30 * s, 10 << 10}}, 40 * s, 42 * s},
		"a pause, and then much":    {[]part{{28 * s, 30 << 10}}, 58 * s, 60 * s},
		"long at the rate": {[]part{{0, 90 << 10}, {20 * s, 30 << 10}, {40 * s, 30 << 10}, {3600 * s, 30 << 10}}, 3630 * s,
			3632 * s},
		"what came long before is gone": {[]part{{0, 16 << 20}, {100 * s, 1 << 10}}, 30 * s, 30 * s},
	} {
		r := bodyRate{window: 30 * s}
		for _, p := range c.parts {
			r.add(p.at, p.bytes)
		}
		if got := r.deadline(); got < c.min || got > c.max {
			t.Errorf("%s: too slow at %v, want between %v and %v", name, got, c.min, c.max)
		}
	}
}

// observingReader calls a function before each read.
type observingReader struct {
	io.Reader
	before func()
}

func (r observingReader) Read(p []byte) (int, error) {
	r.before()
	return r.Reader.Read(p)
}

func TestBodyReservationFollowsArrival(t *testing.T) {
	t.Parallel()
	const size = 5<<20 + 12345
	for _, claimed := range []int64{-1, 1, size, 60 << 20} {
		b, body := NewBodyPool(new(Tenants)), bytes.NewReader(make([]byte, size))
		from := observingReader{iotest.HalfReader(body), func() {
			arrived := size - int64(body.Len())
			if reserved := b.tenants.BodyBytesInUse(); reserved > 2*arrived+64<<10 {
				t.Errorf("claimed %d: %d bytes are reserved for %d that have arrived", claimed, reserved, arrived)
			}
		}}
		buf, err := b.ReadBody(from, claimed, Tenant{}, BodyLimits{64 << 20, 1 << 30})
		if err != nil {
			t.Error(err)
		}
		b.ReleaseBuffer(buf, Tenant{})
	}
}
