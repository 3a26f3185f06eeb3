package loadgen

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/lab/replay"
)

func greeting(streams bool) Request {
	turn := Turn{Messages: []Message{{Role: "user", Content: "Hello"}}, OutputTokens: 2, Greedy: true}
	return Request{Body: ChatBody("sim", turn, streams), Stream: streams}
}

// whole writes a response that is not a stream.
func whole(w http.ResponseWriter, finish string) {
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, `{"choices":[{"message":{"content":"one two"},"finish_reason":"`+finish+
		`"}],"usage":{"prompt_tokens":40,"completion_tokens":2}}`)
}

func TestSend(t *testing.T) {
	f := func(streams bool, want Response, h http.HandlerFunc) {
		t.Helper()
		p, _ := played(t, h)
		got := p.Send(t.Context(), greeting(streams))
		if got.Err != want.Err || got.Status != want.Status || got.Committed != want.Committed || got.Finish != want.Finish ||
			got.Usage != want.Usage || got.Output != want.Output || got.Backend != want.Backend || got.Attempts != want.Attempts ||
			!strings.Contains(got.Detail, want.Detail) || want.Detail == "" && got.Detail != "" {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
	}
	f(true, Response{Status: 200, Committed: true, Finish: "length", Usage: true, Output: "one two", Backend: "b1", Attempts: 2},
		func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Warmroute-Backend", "b1")
			w.Header().Set("X-Warmroute-Attempts", "2")
			opening(w)
			content(w, "one ")
			content(w, "two")
			ending(w)
		})
	f(false, Response{Status: 200, Committed: true, Finish: "length", Usage: true, Output: "one two"},
		func(w http.ResponseWriter, r *http.Request) { whole(w, "length") })
	f(false, Response{Result: replay.Result{Err: "response aborted"}, Status: 200, Committed: true, Finish: "abort", Usage: true,
		Output: "one two"},
		func(w http.ResponseWriter, r *http.Request) { whole(w, "abort") })
	f(true, Response{Result: replay.Result{Err: "response is not a stream"}, Status: 200}, func(w http.ResponseWriter, r *http.Request) {
		whole(w, "length")
	})
	f(false, Response{Result: replay.Result{Err: "response is a stream"}, Status: 200}, func(w http.ResponseWriter, r *http.Request) {
		opening(w)
	})
	f(false, Response{Result: replay.Result{Err: "response is not JSON", Detail: "oops"}, Status: 200, Committed: true},
		func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "oops") })
	f(false, Response{Result: replay.Result{Err: "body truncated", Detail: "EOF"}, Status: 200, Committed: true},
		func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, `{"choices":[`)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		})
	f(true, Response{Result: replay.Result{Err: "status 503", Detail: "busy"}, Status: 503}, func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "busy", http.StatusServiceUnavailable)
	})
	f(true, Response{Result: replay.Result{Err: "stream truncated"}, Status: 200, Committed: true, Output: "one"},
		func(w http.ResponseWriter, r *http.Request) { opening(w); content(w, "one") })
	f(true, Response{Result: replay.Result{Err: "error event in the stream", Detail: "died"}, Status: 200},
		func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			dataEvent(w, `{"error":{"message":"died"}}`)
		})
}

// TestSendToSimulator holds that its responses are the same, streamed or not,
// and a completion's text is found too.
func TestSendToSimulator(t *testing.T) {
	p, _ := simulated(t)
	streamed, plain := p.Send(t.Context(), greeting(true)), p.Send(t.Context(), greeting(false))
	if streamed.Err != "" || plain.Err != "" || streamed.Output != plain.Output || len(plain.Output) == 0 || plain.CompletionTokens != 2 {
		t.Errorf("streamed %+v\nplain    %+v", streamed, plain)
	}
	for _, streams := range []bool{true, false} {
		body, _ := json.Marshal(map[string]any{"model": "sim", "prompt": "Hello", "max_tokens": 3, "stream": streams})
		if r := p.Send(t.Context(), Request{Path: "/v1/completions", Body: body, Stream: streams}); r.Err != "" || r.Output == "" {
			t.Errorf("completion: %+v", r)
		}
	}
}

// TestClientBehavior checks from the server's side that clients behave as configured.
func TestClientBehavior(t *testing.T) {
	f := func(m ClientBehavior, h http.HandlerFunc, want string) {
		t.Helper()
		done := make(chan struct{})
		p, _ := played(t, func(w http.ResponseWriter, r *http.Request) {
			defer close(done)
			h(w, r)
		})
		ask := greeting(true)
		ask.Behavior = m
		if got := p.Send(t.Context(), ask); got.Err != want {
			t.Errorf("%+v: got %+v, want %q", m, got, want)
		}
		<-done
	}
	waits := func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}
	f(ClientBehavior{DisconnectAfter: 20 * time.Millisecond}, waits, ClientDisconnected)
	f(ClientBehavior{DisconnectInBody: true}, func(w http.ResponseWriter, r *http.Request) {
		if got, err := io.ReadAll(r.Body); err == nil || len(got) >= len(greeting(true).Body) {
			t.Errorf("the body came whole: %q", got)
		}
	}, ClientDisconnected)
	f(ClientBehavior{DisconnectAtEvent: 2}, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		opening(w)
		content(w, "one")
		<-r.Context().Done()
	}, ClientDisconnected)
	began := time.Now()
	f(ClientBehavior{UploadTime: 100 * time.Millisecond, ReadPause: 50 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
		if got, err := io.ReadAll(r.Body); err != nil || string(got) != string(greeting(true).Body) {
			t.Errorf("got %q, %v", got, err)
		}
		opening(w)
		content(w, "one")
		ending(w)
	}, "")
	if took := time.Since(began); took < 140*time.Millisecond {
		t.Errorf("upload and pause took %v", took)
	}
}
