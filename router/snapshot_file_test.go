package router

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/router/index"
)

// sealed gives data a checksum that fits.
func sealed(data []byte) []byte {
	var out bytes.Buffer
	w := snapshotWriter{to: &out, sum: xxh3.New()}
	w.write(data[:len(data)-8])
	if err := w.end(); err != nil {
		panic(err)
	}
	return out.Bytes()
}

func TestSnapshotsThatAreOfNoUseAreRefusedWithTheReason(t *testing.T) {
	good := warm(t).write(t)
	f := func(name, want string, data []byte, change func(*kept)) {
		t.Helper()
		k := newKept(t, 2)
		change(k)
		err := k.Read(bytes.NewReader(data))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", name, err, want)
		}
		for _, p := range k.read {
			if p != nil {
				t.Errorf("%s: something of it is kept", name)
			}
		}
	}
	plain := func(*kept) {}
	edit := func(change func([]byte)) []byte {
		b := bytes.Clone(good)
		change(b)
		return b
	}
	f("empty", "too soon", nil, plain)
	f("foreign", "no snapshot", []byte(strings.Repeat("# a readme\n", 50)), plain)
	f("version", "version 2", edit(func(b []byte) { b[len(snapshotMagic)] = 2 }), plain)
	f("other block size", "index.block_bytes", good, func(k *kept) { k.blockBytes = 512 })
	f("too old", "25h", good, func(k *kept) { k.clock.advance(25 * time.Hour) })
	f("too large", "index.max_bytes", good, func(k *kept) { k.maxBytes = int64(len(good)) - 1 })
	f("one part too many", "too soon", sealed(edit(func(b []byte) { b[len(snapshotMagic)+12]++ })), plain)
	f("one part too few", "goes on", sealed(edit(func(b []byte) { b[len(snapshotMagic)+12]-- })), plain)
	for n := range good[:len(good)-1] {
		f(fmt.Sprintf("cut after %d bytes", n), "", good[:n], plain)
	}
	for n := range good {
		f(fmt.Sprintf("byte %d is another", n), "", edit(func(b []byte) { b[n] ^= 0x10 }), plain)
	}
}

func TestAFingerprintTellsBlockSizesApart(t *testing.T) {
	if fingerprint(256) == fingerprint(512) {
		t.Error("fingerprints do not tell block sizes apart")
	}
}

// A snapshot of format 1 stays readable as long as the version says 1.
func TestGoldenSnapshot(t *testing.T) {
	data, err := os.ReadFile("testdata/snapshot-1")
	if err != nil {
		t.Fatal(err)
	}
	parts, err := parseSnapshot(data, fingerprintIn(data), time.Unix(1000, 0))
	if err != nil {
		t.Fatal(err)
	}
	p := parts["http://10.0.0.1:8000"]
	if len(parts) != 2 || p == nil || p.load.StartTime != 900 || p.load.PrefixHits != 3000 || !p.taken.Equal(time.Unix(1000, 0)) {
		t.Fatalf("got %d parts, %+v", len(parts), p)
	}
	if l := newLessons(); !l.recall(p.lessons) || l.answer.value >= answerTokens {
		t.Errorf("answers of %.0f tokens, where all had one", l.answer.value)
	}
	x := index.New(1, 1<<20)
	x.SetCapacity(0, 10_000)
	x.Import(0, p.count).Add(p.blocks())
	depth := []int{0}
	if x.Match(ask(nil, 7, 12).Blocks, depth); depth[0] != 12 || p.count != 150 {
		t.Errorf("%d of 12 blocks of a prompt found among %d", depth[0], p.count)
	}
}

// fingerprintIn is the one that a snapshot carries.
func fingerprintIn(data []byte) uint64 {
	if len(data) < snapshotHead {
		return 0
	}
	at := len(snapshotMagic) + 4
	var f uint64
	for i, b := range data[at : at+8] {
		f |= uint64(b) << (8 * i)
	}
	return f
}

func FuzzParseSnapshot(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte(snapshotMagic))
	for _, k := range []*kept{newKept(f, 0), newKept(f, 3), warm(f)} {
		data := k.write(f)
		f.Add(data[:len(data)-8])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		data = sealed(append(bytes.Clone(data), make([]byte, 8)...)) // what lies behind the checksum is to be reached
		parts, err := parseSnapshot(data, fingerprintIn(data), time.Unix(1000, 0))
		if err != nil {
			return
		}
		for _, p := range parts {
			l := began()
			_ = p.contradicted(&l)
			lessons := newLessons()
			lessons.recall(p.lessons)
			blocks := p.blocks()
			x := index.New(1, 1<<20)
			x.SetCapacity(0, 100)
			if n, _ := x.Import(0, len(blocks)).Add(blocks); n != x.Len(0) || n > 100 {
				t.Errorf("%d blocks taken, %d held", n, x.Len(0))
			}
		}
	})
}
