package upstream

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"warmroute/prompt"
)

func TestEditedBody(t *testing.T) {
	long := strings.Repeat("x", maxCopiedSpan+1)
	for _, c := range []struct {
		body  string
		edits []prompt.Edit
		want  string
		parts int
	}{
		{"abc", nil, "abc", 1},
		{"abc", []prompt.Edit{{Start: 1, End: 2, Text: "BB"}}, "aBBc", 1},
		{"abc", []prompt.Edit{{Start: 0, End: 0, Text: "1"}, {Start: 0, End: 0, Text: "2"}, {Start: 3, End: 3, Text: "3"}}, "12abc3", 1},
		{"a" + long + "b", []prompt.Edit{{Start: 1, End: 1, Text: "1"}}, "a1" + long + "b", 2},
		{"a" + long + "b", []prompt.Edit{{Start: 1, End: 1, Text: "1"}, {Start: 1 + len(long), End: 2 + len(long), Text: "c"}}, "a1" + long + "c",
			3},
	} {
		b := newEditedBody([]byte(c.body), c.edits)
		if len(b.parts) != c.parts || b.length != int64(len(c.want)) {
			t.Errorf("%.20s: %d parts, %d bytes", c.body, len(b.parts), b.length)
		}
		var out bytes.Buffer
		if n, err := b.WriteTo(&out); err != nil || n != b.length || out.String() != c.want {
			t.Errorf("%.20s: wrote %d, %v: %.40s", c.body, n, err, out.String())
		}
		if read, err := io.ReadAll(io.Reader(newEditedBody([]byte(c.body), c.edits))); err != nil || string(read) != c.want {
			t.Errorf("%.20s: read %.40s, %v", c.body, read, err)
		}
	}
}

func TestLateBodyIsIncomplete(t *testing.T) {
	for _, size := range []int{10, maxLastWrite, 3 * maxLastWrite} {
		b := newEditedBody(bytes.Repeat([]byte("x"), size), nil)
		b.notAfter = time.Now().Add(-time.Second)
		var out bytes.Buffer
		if n, err := b.WriteTo(&out); !errors.Is(err, ErrLateTransfer) || n != int64(max(size-maxLastWrite, 0)) || n != int64(out.Len()) {
			t.Errorf("of %d bytes %d were written, %v", size, n, err)
		}
	}
}
