package http1_test

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

func TestShutdownClosesIdleConnectionsAndWaitsForBusyOnes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		on, why := make(chan struct{}), error(nil)
		s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/last" {
				hello(w, r)
				return
			}
			held(on, &why)(w, r)
		})
		idle, busy := s.dial(), s.dial()
		idle.say("GET /last HTTP/1.1\r\nHost: h\r\n\r\n")
		idle.has(1, "hello", false)
		busy.say(get)
		ended := make(chan error, 1)
		go func() { ended <- s.Shutdown(context.Background()) }()
		idle.has(1, "hello", true)
		time.Sleep(time.Hour)
		busy.has(0, "", false)
		select {
		case err := <-ended:
			t.Fatalf("Shutdown returned %v before the last answer", err)
		default:
		}
		close(on)
		busy.has(1, "Connection: close", true)
		if err := <-ended; err != nil || why != nil {
			t.Errorf("Shutdown returned %v, the request's end %v", err, why)
		}
	})
}

func TestShutdownGivesUpWithItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		on, why := make(chan struct{}), error(nil)
		s := run(t, nil, held(on, &why))
		c := s.dial()
		c.say(get)
		limit, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.Shutdown(limit); err != context.DeadlineExceeded {
			t.Errorf("got %v", err)
		}
		c.has(0, "", false)
		_ = s.Close()
		c.has(0, "", true)
		if why != context.Canceled {
			t.Errorf("the request ended with %v", why)
		}
	})
}

// What is said within five seconds by a connection that has said nothing yet, or
// only the half of it, is answered.
func TestShutdownGivesNewConnectionsAMoment(t *testing.T) {
	for name, before := range map[string]string{"nothing": "", "half a header": get[:10]} {
		for _, wait := range []time.Duration{4 * time.Second, 6 * time.Second} {
			t.Run(fmt.Sprintf("%s, %v", name, wait), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					s := run(t, nil, hello)
					fresh, later := s.dial(), s.dial()
					fresh.say(before)
					later.say(get + before)
					ended := make(chan error, 1)
					go func() { ended <- s.Shutdown(context.Background()) }()
					synctest.Wait()
					time.Sleep(wait)
					fresh.say(get[len(before):])
					later.say(get[len(before):])
					switch {
					case wait < 5*time.Second && before != "":
						fresh.has(1, "Connection: close", true)
						later.has(2, "Connection: close", true)
					case wait < 5*time.Second:
						fresh.has(1, "Connection: close", true)
						later.has(1, "hello", true)
					case before != "":
						fresh.has(1, "400 Bad Request", true)
						later.has(2, "400 Bad Request", true)
					default:
						fresh.has(0, "", true)
						later.has(1, "hello", true)
					}
					if err := <-ended; err != nil {
						t.Error(err)
					}
				})
			})
		}
	}
}

// The next request may come while one is answered: it is not dropped.
func TestShutdownAnswersWhatHasCome(t *testing.T) {
	for name, wait := range map[string]time.Duration{"in the buffer": 0, "seen by the watch": time.Second} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				on, why := make(chan struct{}), error(nil)
				s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
					w.(interface{ FlushError() error }).FlushError()
					held(on, &why)(w, r)
				})
				c := s.dial()
				if wait == 0 {
					c.say(get + get)
				} else {
					c.say(get)
					time.Sleep(wait)
					c.say(get)
				}
				ended := make(chan error, 1)
				go func() { ended <- s.Shutdown(context.Background()) }()
				synctest.Wait()
				close(on)
				c.has(2, "Connection: close", true)
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}
