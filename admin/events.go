package admin

import (
	"net/http"
	"time"
)

const (
	// mostListeners is how many pages may be open.
	mostListeners = 16
	// eventEvery is how often a listener gets the state. It has to come that often:
	// one that hears nothing for some seconds takes the connection for broken.
	eventEvery = time.Second
	// listenerPatience is how long a listener may take to read one event.
	listenerPatience = 5 * time.Second
)

// events sends the state again and again, until the listener leaves, no longer
// reads, or the proxy ends.
func (h *Handler) events(w http.ResponseWriter, r *http.Request) {
	limited(h.listeners, w, r, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("X-Accel-Buffering", "no") // a proxy in between is to pass each event on at once
		again := time.NewTicker(eventEvery)
		defer again.Stop()
		token := h.token.Load()
		for h.token.Load() == token { // else it has to show the new one
			if !send(w, "state", h.state()) {
				return
			}
			select {
			case <-again.C:
			case <-r.Context().Done():
				return
			case <-h.ended:
				send(w, "end", []byte("{}"))
				return
			}
		}
	}))
}

// send writes one event, and reports whether the listener took it. data is one line.
func send(w http.ResponseWriter, event string, data []byte) bool {
	c := http.NewResponseController(w)
	// An error says that the connection knows no deadlines; then there is none.
	_ = c.SetWriteDeadline(time.Now().Add(listenerPatience))
	for _, part := range [][]byte{[]byte("event: " + event + "\ndata: "), data, []byte("\n\n")} {
		if _, err := w.Write(part); err != nil {
			return false
		}
	}
	return c.Flush() == nil
}

// EndEvents ends what is sent to listeners, so that nobody waits for them; more
// than once, too. Those that come later get the state once.
func (h *Handler) EndEvents() { h.endOnce.Do(func() { close(h.ended) }) }
