package proxy

import (
	"net/http"
	"strings"
	"testing"
)

// firstFails are the ways in which an attempt fails before it is committed.
var firstFails = []struct {
	name   string
	stream bool // what the client asks for
	script func(*session)
	reason string // as counted
}{
	{"reset before the header", true, func(s *session) { s.request(); s.reset() }, "broken"},
	{"closed before the header", false, once(), "broken"},
	{"closed in the header", false, once("HTTP/1.1 200 OK\r\ncontent-ty"), "broken"},
	{"closed after the header", true, once(sseHead), "broken"},
	{"reset after the header", true, func(s *session) { s.request(); s.say(sseHead); s.reset() }, "broken"},
	{"comments, then closed", true, once(sseHead, chunk(": keep-alive\n\n"), chunk(": keep-alive\n\n")), "broken"},
	{"comments, then a proper end", true, always(streamed(": keep-alive\n\n")), "broken"},
	{"stream to the connection's end, closed after a comment", true, once(sseToEnd, ": keep-alive\n\n"), "broken"},
	{"closed in the first event", true, once(sseHead, chunk(role[:40])), "broken"},
	{"500", false, always(answered("500 Internal Server Error", `{"error":{"message":"cannot schedule new futures after shutdown"}}`)), "status_500"},
	{"500 without a body", true, always(answered("500 Internal Server Error", "")), "status_500"},
	{"502", false, always(answered("502 Bad Gateway", "x")), "status_502"},
	{"503", true, always(answered("503 Service Unavailable", "x")), "status_503"},
	{"504", false, always(answered("504 Gateway Timeout", "x")), "status_504"},
	{"503 cut short", true, once(strings.TrimSuffix(answered("503 Service Unavailable", "xyz"), "z")), "broken"},
	{"error event first", true, always(streamed(dead, doneLine)), "error_event"},
	{"error event after the role", true, always(streamed(role, dead, doneLine)), "error_event"},
	{"abort after the role", true, always(streamed(role, abort, doneLine)), "aborted"},
	{"abort in one packet with the role", true, always(streamed(role + abort + counted + doneLine)), "aborted"},
	{"an end after the role, with no word of why", true, always(streamed(role, counted+doneLine)), "aborted"},
	{"abort alone", true, always(streamed(abort, doneLine)), "aborted"},
	{"whole answer with an abort", false, always(answered("200 OK", wholeAbort)), "aborted"},
	{"whole answer cut short", false, once(strings.TrimSuffix(answered("200 OK", whole), "}}}")), "broken"},
	{"chunked whole answer cut short", false, once("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n", chunk(whole)), "broken"},
	{"a redirect", false, always(answered("307 Temporary Redirect", "", "location: http://127.0.0.1:1/v1/chat/completions")), "redirect"},
	{"a redirect to say goodbye", true, always(answered("301 Moved Permanently", "gone", "location: /")), "redirect"},
	{"a stream compressed unasked", true, always(strings.Replace(streamed(goodStream), "text/event-stream", "text/event-stream\r\ncontent-encoding: gzip", 1)), "encoded"},
	{"a header beyond all bounds", false, always(answered("200 OK", whole, "x-bomb: "+strings.Repeat("b", 200<<10))), "broken"},
	{"a header of many lines", false, always(answered("200 OK", whole, strings.Repeat("x-bomb: b\r\n", 20_000)+"x-last: b")), "broken"},
	{"a header split by a bare CR", false, always(answered("200 OK", whole, "x-a: b\rset-cookie: c")), "broken"},
	{"a header split by a bare LF", false, always(answered("200 OK", whole, "x-a: b\nset-cookie: c")), "broken"},
	{"two lengths", false, always(answered("200 OK", whole, "content-length: 1")), "broken"},
	{"length and chunks", false, always(answered("200 OK", whole, "transfer-encoding: chunked")), "broken"},
	{"a length of 10 GB, and nothing of it", false, once("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 10000000000\r\n\r\n{"), "broken"},
	{"nothing like HTTP", true, always("+PONG\r\n"), "broken"},
	{"interim answers on and on", true, always(strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 10_000)), "broken"},
	{"unframed whole answer cut short", false, once("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n", whole[:50]), "broken"},
}

func TestFailedAttemptIsMadeElsewhere(t *testing.T) {
	for _, c := range firstFails {
		t.Run(c.name, func(t *testing.T) {
			body, good, want := askWhole, answered("200 OK", whole), whole
			if c.stream {
				body, good, want = askStream, streamed(goodStream), goodStream
			}
			first, second := &replica{script: c.script}, &replica{script: always(good)}
			f := serve(t, nil, first, second)
			resp, answer := f.post("/v1/chat/completions", body)
			if resp.StatusCode != http.StatusOK || answer != want {
				t.Errorf("got %d %q, want the second replica's %q", resp.StatusCode, answer, want)
			}
			if got := resp.Header.Get("X-Warmroute-Attempts"); got != "2" {
				t.Errorf("attempts %q, want 2", got)
			}
			if got := resp.Header.Get("X-Warmroute-Backend"); got != "r1" {
				t.Errorf("answered by %q", got)
			}
			for i, r := range []*replica{first, second} {
				if seen := r.requests(); len(seen) != 1 || seen[0].body != body {
					t.Errorf("replica %d saw %d requests, want the client's body once", i, len(seen))
				}
			}
			f.settled()
			if got := f.blocks(); got[0] != 0 || got[1] != questionBlocks {
				t.Errorf("index holds %v blocks, want none of the first attempt and %d", got, questionBlocks)
			}
			f.counts(`warmroute_retries_total{reason="` + c.reason + `"} 1`)
		})
	}
}

func TestRefusedConnectionCountsAsNoAttempt(t *testing.T) {
	good := &replica{script: always(answered("200 OK", whole))}
	gone := []*replica{{}, {}, {}, {}}
	f := serve(t, nil, append(gone, good)...)
	for _, r := range gone {
		r.listener.Close()
	}
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if answer != whole || resp.Header.Get("X-Warmroute-Attempts") != "5" {
		t.Errorf("got %q after %s attempts", answer, resp.Header.Get("X-Warmroute-Attempts"))
	}
	f.settled()
	if got := f.blocks(); got[0] != 0 || got[4] != questionBlocks {
		t.Errorf("index holds %v blocks", got)
	}
}

func TestAttemptsAreBounded(t *testing.T) {
	var replicas []*replica
	for range 5 {
		replicas = append(replicas, &replica{script: once()})
	}
	f := serve(t, nil, replicas...)
	resp, _ := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusBadGateway {
		t.Errorf("status %d", resp.StatusCode)
	}
	for i, r := range replicas {
		if got, want := len(r.requests()), min(1, max(0, 3-i)); got != want {
			t.Errorf("replica %d saw %d requests, want %d", i, got, want)
		}
	}
}

func TestWhenAllFail(t *testing.T) {
	full := answered("503 Service Unavailable", `{"error":{"message":"queue full","type":"x","param":null,"code":503}}`, "x-why: full")
	cases := []struct {
		name       string
		scripts    []func(*session)
		status     int
		retryAfter string
		answer     string // part of it
		ours       bool
	}{
		{"503 gets a Retry-After", []func(*session){once(), always(full)}, 503, "1", "queue full", false},
		{"503 keeps its Retry-After", []func(*session){always(answered("503 Service Unavailable", "x", "retry-after: 7"))}, 503, "7", "x", false},
		{"500 in its own words", []func(*session){always(full), always(answered("500 Internal Server Error", "dead"))}, 500, "", "dead", false},
		{"words outlast a reset", []func(*session){always(full), once()}, 503, "1", "queue full", false},
		{"words of any length are whole", []func(*session){always(answered("503 Service Unavailable", strings.Repeat("w", 60_000)+"!"))}, 503, "1", "w!", false},
		{"words without end are none", []func(*session){always(answered("500 Internal Server Error", strings.Repeat("w", 64<<10+1)))}, 502, "1", "replica_failed", true},
		{"resets", []func(*session){once(), once()}, 502, "1", "replica_failed", true},
		{"error event", []func(*session){always(streamed(dead, doneLine))}, 500, "", "EngineCore encountered", false},
		{"abort", []func(*session){always(streamed(role, abort, doneLine))}, 503, "1", "shutting down", true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var replicas []*replica
			for _, s := range c.scripts {
				replicas = append(replicas, &replica{script: s})
			}
			f := serve(t, nil, replicas...)
			resp, answer := f.post("/v1/chat/completions", askStream)
			if resp.StatusCode != c.status || resp.Header.Get("Retry-After") != c.retryAfter || !strings.Contains(answer, c.answer) {
				t.Errorf("got %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), answer)
			}
			if ours := strings.Contains(answer, `"src":"warmroute"`); ours != c.ours {
				t.Errorf("marked as ours: %v, want %v", ours, c.ours)
			}
			f.settled()
			for i, n := range f.blocks() {
				if n != 0 {
					t.Errorf("index still holds %d blocks of backend %d", n, i)
				}
			}
		})
	}
}

func TestRefusedEverywhereIsA502(t *testing.T) {
	r := &replica{}
	f := serve(t, nil, r)
	r.listener.Close()
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusBadGateway || !strings.Contains(answer, `"src":"warmroute"`) {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
}

func TestNoneReadyIsA503(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	f.backends[0].SetState(0)
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(answer, `"src":"warmroute"`) {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if len(r.requests()) != 0 {
		t.Error("a backend that is down was asked")
	}
}

func TestClientErrorsPassThroughOnce(t *testing.T) {
	for _, answer := range []string{
		answered("400 Bad Request", `{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}`),
		answered("401 Unauthorized", `{"error":"Unauthorized"}`),
		answered("404 Not Found", `{"detail":"Not Found"}`),
		answered("413 Content Too Large", ``),
		answered("422 Unprocessable Entity", `{"detail":[{"loc":["body"]}]}`),
		answered("429 Too Many Requests", `slow down`, "retry-after: 3"),
		answered("501 Not Implemented", `{"error":{"code":501}}`),
	} {
		line, rest, _ := strings.Cut(answer, "\r\n")
		t.Run(line, func(t *testing.T) {
			first, second := &replica{script: always(answer)}, &replica{script: always(answered("200 OK", whole))}
			f := serve(t, nil, first, second)
			resp, got := f.post("/v1/chat/completions", askStream)
			_, want, _ := strings.Cut(rest, "\r\n\r\n")
			if !strings.Contains(line, resp.Status[:3]) || got != want {
				t.Errorf("got %s %q, want %q", resp.Status, got, want)
			}
			if strings.Contains(answer, "retry-after") && resp.Header.Get("Retry-After") != "3" {
				t.Error("Retry-After was lost")
			}
			if len(first.requests()) != 1 || len(second.requests()) != 0 {
				t.Error("was not asked once")
			}
			f.settled()
			if got := f.blocks(); got[0] != 0 {
				t.Errorf("index holds %d blocks of a prompt that the engine never saw", got[0])
			}
		})
	}
}

func TestErrorEventOfTheClientsFaultPassesThrough(t *testing.T) {
	first, second := &replica{script: always(streamed(tooLong, doneLine))}, &replica{script: always(streamed(goodStream))}
	f := serve(t, nil, first, second)
	resp, got := f.post("/v1/chat/completions", askStream)
	if resp.StatusCode != http.StatusOK || got != tooLong+doneLine {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	if len(second.requests()) != 0 {
		t.Error("another backend was asked")
	}
	f.settled()
	if got := f.blocks(); got[0] != 0 {
		t.Errorf("index holds %d blocks of a prompt that the engine never saw", got[0])
	}
}
