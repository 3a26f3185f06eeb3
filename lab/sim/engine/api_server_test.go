package engine

import (
	"testing"
	"time"
)

// TestAPIServer sends prompts to two engines behind one API server, which takes 1 ms for 100 tokens.
func TestAPIServer(t *testing.T) {
	cfg := Config{PromptTokenTime: 10 * time.Microsecond, PriorityScheduling: true}
	engines := []*Engine{newEngine(cfg), newEngine(cfg)}
	NewBalancer(engines)
	first := add(t, engines[0], 1000, 1, nil, 0)
	second := add(t, engines[1], 500, 1, nil, time.Millisecond)
	third := add(t, engines[1], 300, 1, nil, 2*time.Millisecond)
	if st := engines[1].Stats(); st.Waiting != 0 || st.Arriving != 2 || engines[1].Idle() {
		t.Errorf("%d requests wait while the API server handles them; idle: %v", st.Waiting, engines[1].Idle())
	}
	finish(t, engines[0], first, 0)
	finish(t, engines[1], third, time.Millisecond)
	later := add(t, engines[0], 100, 1, nil, time.Second)
	finish(t, engines[0], later, time.Second)
	for _, c := range []struct {
		name string
		r    *Request
		want time.Duration
	}{
		{"first", first, 10 * time.Millisecond},
		{"arrived while the first was handled", second, 15 * time.Millisecond},
		{"after the step that began before it was ready", third, second.FirstToken},
		{"after a pause", later, 1001 * time.Millisecond},
	} {
		if c.r.Started != c.want {
			t.Errorf("%s: started at %v, want %v", c.name, c.r.Started, c.want)
		}
	}
}

func TestAbortAtAPIServer(t *testing.T) {
	e := newEngine(Config{PromptTokenTime: 10 * time.Microsecond})
	r, other := add(t, e, 100, 1, nil, 0), add(t, e, 100, 1, nil, 0)
	e.Abort(r)
	finish(t, e, other, 0)
	if !e.Idle() || r.Started != 0 || other.Started != 2*time.Millisecond {
		t.Errorf("the aborted one started at %v, the other at %v", r.Started, other.Started)
	}
}
