package proxy

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends/transport"
)

// allocated is how much memory the process asks for while f runs, given back or not.
func allocated(f func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// flood writes n bytes as chunks of 64 KB.
func (s *session) flood(n int) {
	piece := append(append([]byte("10000\r\n"), bytes.Repeat([]byte("x"), 64<<10)...), "\r\n"...)
	for ; n > 0; n -= 64 << 10 {
		if _, err := s.Conn.Write(piece); err != nil {
			return
		}
	}
}

// However long a line or an answer is, it passes, and what is kept of it is bounded.
func TestAHundredMegabytesPassInBoundedMemory(t *testing.T) {
	const long = 100 << 20
	jsonHead := "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
	for name, script := range map[string]func(*session){
		"a line in mid-stream": func(s *session) {
			s.say(sseHead, chunk(role+hello+"data: "))
			s.flood(long)
			s.say(chunk("\n\n"+doneLine), lastChunk)
		},
		"the first line": func(s *session) {
			s.say(sseHead, chunk("data: "))
			s.flood(long)
			s.say(chunk("\n\n"+doneLine), lastChunk)
		},
		"a comment": func(s *session) {
			s.say(sseHead, chunk(role+hello+": "))
			s.flood(long)
			s.say(chunk("\n\n"+doneLine), lastChunk)
		},
		"a whole answer": func(s *session) {
			s.say(jsonHead)
			s.flood(long)
			s.say(lastChunk)
		},
		"a refusal": func(s *session) {
			s.say(strings.Replace(jsonHead, "200 OK", "400 Bad Request", 1))
			s.flood(long)
			s.say(lastChunk)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: func(s *session) {
				if _, ok := s.request(); ok {
					script(s)
				}
			}})
			var got int64
			spent := allocated(func() {
				resp, err := f.client.Post(f.url+"/v1/chat/completions", "application/json", strings.NewReader(askStream))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if got, err = io.Copy(io.Discard, resp.Body); err != nil {
					t.Fatal(err)
				}
			})
			if got < long {
				t.Errorf("%d bytes came through, of %d", got, long)
			}
			if spent > memoryCost*16<<20 {
				t.Errorf("%d MB were allocated on the way", spent>>20)
			}
		})
	}
}

// A refusal without end is no words for a client: it is cut off, and another asked.
func TestAnErrorWithoutEndIsCutOff(t *testing.T) {
	first := &replica{script: func(s *session) {
		s.request()
		s.say("HTTP/1.1 500 Internal Server Error\r\ntransfer-encoding: chunked\r\n\r\n")
		s.flood(1 << 40)
	}}
	f := serve(t, nil, first, &replica{script: always(answered("200 OK", whole))})
	if _, answer := f.post("/v1/chat/completions", askWhole); answer != whole {
		t.Errorf("got %q", answer)
	}
}

// Comments are no event, however many: the wait for the first one goes on.
func TestCommentsWithoutEndAreNoAnswer(t *testing.T) {
	comments := bytes.Repeat([]byte(": nothing yet\n\n"), 4<<10)
	comments = append(append(fmt.Appendf(nil, "%x\r\n", len(comments)), comments...), "\r\n"...)
	for name, f := range map[string]struct {
		pause time.Duration
		code  int // of the answer: 200 where its beginning had to be passed on
	}{
		"a flood": {0, http.StatusOK}, // a mebibyte is held back at most
		"a drip":  {20 * time.Millisecond, http.StatusGatewayTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			fleet := serve(t, func(o *Options) { o.FirstByte = time.Second }, &replica{script: func(s *session) {
				s.request()
				s.say(sseHead)
				for {
					piece := comments
					if f.pause > 0 {
						piece = []byte(chunk(": nothing yet\n\n"))
					}
					if _, err := s.Conn.Write(piece); err != nil {
						return
					}
					time.Sleep(f.pause)
				}
			}})
			resp, answer := fleet.post("/v1/chat/completions", askStream)
			if resp.StatusCode != f.code || !strings.Contains(answer, "first_byte_timeout") {
				t.Errorf("status %d, %d bytes that end in %q", resp.StatusCode, len(answer), answer[max(0, len(answer)-200):])
			}
		})
	}
}

// Whoever asked for no stream waits as long as the replica computes, but not for
// the rest of a header.
func TestAHeaderThatStallsIsAskedForElsewhere(t *testing.T) {
	f := serve(t, nil, &replica{script: func(s *session) {
		s.request()
		s.say("HTTP/1.1 200 OK\r\ncontent-ty")
		s.closed()
	}}, &replica{script: always(answered("200 OK", whole))})
	terms := *f.backends[0].Terms()
	impatient := transport.New(transport.Options{URL: f.backends[0].URL, HeaderTimeout: 20 * time.Millisecond})
	terms.Transport = impatient
	f.backends[0].SetTerms(terms)
	if _, answer := f.post("/v1/chat/completions", askWhole); answer != whole {
		t.Errorf("got %q", answer)
	}
	f.counts(`warmroute_retries_total{reason="broken"} 1`)
}

func TestEncodedAnswerPassesAsItIs(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	io.WriteString(z, whole)
	z.Close()
	framed := answered("200 OK", packed.String(), "content-encoding: gzip")
	toEnd := "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n\r\n" + packed.String()
	for name, script := range map[string]func(*session){"framed": always(framed), "to the connection's end": once(toEnd)} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: script})
			resp, answer := f.post("/v1/chat/completions", askWhole)
			if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Encoding") != "gzip" || answer != packed.String() {
				t.Errorf("status %d, header %v, %d bytes", resp.StatusCode, resp.Header, len(answer))
			}
		})
	}
}

// What nobody can answer says what to look at, and shows nobody where a redirect leads.
func TestRedirectsEverywhereAreA502(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("308 Permanent Redirect", "", "location: http://10.9.8.7:8000/inner"))})
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusBadGateway || !strings.Contains(answer, "redirect") || strings.Contains(answer, "10.9.8.7") || resp.Header.Get("Location") != "" {
		t.Errorf("status %d, header %v, %s", resp.StatusCode, resp.Header, answer)
	}
	if log := f.log.String(); !strings.Contains(log, "give the backend the URL of the replica itself") {
		t.Errorf("the log says nothing of what to do: %s", log)
	}
}

// A replica that sends each answer twice is heard once.
func TestNobodyGetsAnothersAnswer(t *testing.T) {
	f := serve(t, nil, &replica{script: func(s *session) {
		for {
			req, ok := s.request()
			if !ok {
				return
			}
			s.say(answered("200 OK", req.body) + answered("200 OK", `{"choices":[],"from":"somebody else"}`))
		}
	}})
	var clients sync.WaitGroup
	for client := range 4 {
		clients.Go(func() {
			for n := range 25 {
				body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"client %d, request %d"}]}`, client, n)
				if _, answer, err := f.try("/v1/chat/completions", body); err != nil || answer != body {
					t.Errorf("%s was answered %q, %v", body, answer, err)
				}
			}
		})
	}
	clients.Wait()
}

func TestAnErrorNamesFewOfManyModels(t *testing.T) {
	f := serve(t, nil, &replica{script: once()})
	var names []string
	for i := range 10_000 {
		names = append(names, fmt.Sprintf("adapter-%d<m", i))
	}
	f.backends[0].SetModels(cards(names))
	resp, answer := f.post("/v1/chat/completions", strings.Replace(askWhole, `"m"`, `"absent"`, 1))
	if resp.StatusCode != http.StatusNotFound || !strings.Contains(answer, "and 9950 more") || len(answer) > 4<<10 {
		t.Errorf("status %d, %d bytes: %.300s", resp.StatusCode, len(answer), answer)
	}
}
