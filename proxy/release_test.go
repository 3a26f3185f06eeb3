package proxy

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
)

// lastWriteRecorder records how many requests the backend has in flight when the end of a response is written.
type lastWriteRecorder struct {
	*httptest.ResponseRecorder
	backend *backends.Backend
	end     string
	found   []int64
}

func (w *lastWriteRecorder) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(w.end)) {
		w.found = append(w.found, w.backend.InFlight.Load())
	}
	return w.ResponseRecorder.Write(b)
}

// TestReleaseBeforeEnd checks that a request's reservation is released before the end of its response is written: the client may send
// its next turn at once.
func TestReleaseBeforeEnd(t *testing.T) {
	events := []string{role, hello, world, stop, counted, doneLine}
	for name, c := range map[string]struct{ ask, answer, end string }{
		"whole":                  {askWhole, answered("200 OK", whole), `"usage"`},
		"stream, in pieces":      {askStream, streamed(events...), "[DONE]"},
		"stream, in one piece":   {askStream, streamed(strings.Join(events, "")), "[DONE]"},
		"stream, usage and done": {askStream, streamed(role+hello, world+stop, counted+doneLine), "[DONE]"},
	} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: always(c.answer)})
			w := &lastWriteRecorder{ResponseRecorder: httptest.NewRecorder(), backend: f.backends[0], end: c.end}
			f.proxy.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(c.ask)))
			if len(w.found) != 1 || w.found[0] != 0 {
				t.Errorf("in flight at the end of the response: %d, want [0]; status %d", w.found, w.Code)
			}
		})
	}
}

// TestEventsAfterEnd checks that what follows the last event is relayed, and is not added to a reply whose memory another request
// may use by then. The race detector reports it otherwise.
func TestEventsAfterEnd(t *testing.T) {
	f := serve(t, nil, &replica{script: func(s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			s.say(sseHead, chunk(role), chunk(hello), chunk(stop), chunk(counted+doneLine))
			for range 3 {
				time.Sleep(time.Millisecond) // so that each is read alone
				s.say(chunk(world))
			}
			s.say(lastChunk)
		}
	}})
	var asking sync.WaitGroup
	for range 8 {
		asking.Go(func() {
			for range 20 {
				want := role + hello + stop + counted + doneLine + world + world + world
				if _, got, err := f.try("/v1/chat/completions", askStream); err != nil || got != want {
					t.Errorf("got %q, %v", got, err)
				}
			}
		})
	}
	asking.Wait()
}
