package proxy

import (
	"net/http"
	"strings"
	"testing"
)

func TestAnswersHeldTogetherAreBounded(t *testing.T) {
	const size = 300 << 10
	full := answered("200 OK", strings.Repeat("x", size))
	broken := full[:len(full)-size/2]
	for _, c := range []struct {
		name  string
		taken int64
		first string
		came  bool
	}{
		{"room, whole", 0, full, true},
		{"room, breaks off", 0, broken, true}, // held, so another backend is asked
		{"no room, whole", heldWholeTotal, full, true},
		{"no room, breaks off", heldWholeTotal, broken, false},
		{"room for a part, breaks off", heldWholeTotal - freeHeld, broken, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: once(c.first)}, &replica{script: once(full)})
			f.proxy.heldWhole.Add(c.taken)
			resp, answer, err := f.try("/v1/embeddings", askWhole)
			if came := err == nil && resp.StatusCode == http.StatusOK && len(answer) == size; came != c.came {
				t.Errorf("it came: %v (%d bytes, %v)", came, len(answer), err)
			}
			eventually(t, "what was held is given back", func() bool { return f.proxy.heldWhole.Load() == c.taken })
			f.proxy.heldWhole.Add(-c.taken)
		})
	}
}

func TestAnAnswerCountsAsHeldWhileItsClientReadsSlowly(t *testing.T) {
	const size = 900 << 10
	f := serve(t, nil, &replica{script: always(answered("200 OK", strings.Repeat("x", size)))})
	for range 20 { // more than sockets hold
		f.askFrom(askWhole).SetReadBuffer(4 << 10)
	}
	eventually(t, "answers are held", func() bool { return f.proxy.heldWhole.Load() >= 5*(heldWhole-freeHeld) })
}
