package proxy

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"warmroute/backends"
)

// suspects reports the names of suspected backends.
func suspects(to chan<- string) func(*backends.Backend) {
	return func(b *backends.Backend) { to <- b.Name }
}

func TestAFirstEventBehindAMebibyteOfCommentsIsSeen(t *testing.T) {
	comments := strings.Repeat(": waiting\n\n", heldStream/8)
	f := serve(t, nil, &replica{script: once(sseHead, chunk(comments), chunk(hello))})
	if _, answer := f.post("/v1/chat/completions", askStream); !strings.Contains(answer, hello) {
		t.Error("the event did not come through")
	}
	f.settled()
	if got := f.blocks()[0]; got != questionBlocks {
		t.Errorf("%d blocks are kept of a prompt that was computed, want %d", got, questionBlocks)
	}
}

func TestClientThatLeavesClosesTheReplicasConnection(t *testing.T) {
	long := strings.Repeat("x", 2<<20)
	cases := []struct {
		name   string
		body   string
		says   []string // what the replica says before it falls silent
		reads  string   // what the client reads before it leaves
		phase  string
		blocks int // what the index keeps, at most
	}{
		{"before the header", askStream, nil, "", "before_answer", 0},
		{"before the header of a whole answer", askWhole, nil, "", "before_answer", 0},
		{"between header and first event", askStream, []string{sseHead}, "", "before_answer", 0},
		{"after a comment", askStream, []string{sseHead, chunk(": keep-alive\n\n")}, "", "before_answer", 0},
		{"in mid-stream", askStream, []string{sseHead, chunk(role), chunk(hello)}, "data: ", "in_stream", questionBlocks},
		{"in a held answer", askWhole, []string{answered("200 OK", whole)[:200]}, "", "before_answer", 0},
		{"in a long answer", askWhole, []string{answered("200 OK", long)[:3<<19]}, "xxxx", "in_body", questionBlocks},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			said, gone := make(chan struct{}), make(chan struct{})
			suspected := make(chan string, 10)
			other := &replica{script: always(answered("200 OK", whole))}
			f := serve(t, func(o *Options) { o.Suspect = suspects(suspected) }, &replica{script: func(s *session) {
				s.request()
				s.say(c.says...)
				close(said)
				s.closed()
				close(gone)
			}}, other)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(c.body))
			ended := make(chan struct{})
			begun := make(chan struct{})
			go func() {
				defer close(ended)
				resp, err := f.client.Do(req)
				if err != nil {
					return
				}
				defer resp.Body.Close()
				io.ReadFull(resp.Body, make([]byte, len(c.reads)))
				close(begun)
				<-ctx.Done()
			}()
			<-said
			if c.reads != "" {
				<-begun
			}
			leave()
			<-gone // while the replica is silent
			<-ended
			f.settled()
			f.counts(`warmroute_aborts_total{phase="` + c.phase + `"} 1`)
			f.counts(`warmroute_requests_total{backend="r0",code="499",endpoint="/v1/chat/completions",model="m"} 1`)
			if len(other.requests()) != 0 || len(suspected) != 0 {
				t.Error("the client's leaving was taken for a failure")
			}
			// Of a prompt that was not computed, what time can have reached stays.
			if got := f.blocks()[0]; c.blocks > 0 && got != c.blocks {
				t.Errorf("index holds %d blocks, want %d", got, c.blocks)
			}
		})
	}
}

func TestClientThatLeavesWhileItUploads(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	c := f.dial()
	io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")
	eventually(t, "the body is being read", func() bool { return f.proxy.bodies.held.Load() > 0 })
	c.SetLinger(0)
	c.Close()
	f.counts(`warmroute_aborts_total{phase="in_upload"} 1`)
	f.counts(`warmroute_requests_total{backend="",code="499",endpoint="/v1/chat/completions",model=""} 1`)
	if len(r.requests()) != 0 {
		t.Error("a backend was asked")
	}
}

func TestClientThatLeavesAtDoneWasServed(t *testing.T) {
	ended := make(chan struct{})
	f := serve(t, nil, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(goodStream)) // and never the last chunk
		s.closed()
		close(ended)
	}})
	c := f.dial()
	io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "+strconv.Itoa(len(askStream))+"\r\n\r\n"+askStream)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	f.expect(resp.Body, goodStream)
	c.Close()
	<-ended
	f.counts(`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="m"} 1`)
}

// A prompt of which time can have computed nothing is taken back whole, so the
// next one is not sent where it is not.
func TestLeavingAtOnceTakesTheIndexBack(t *testing.T) {
	long := `{"model":"m","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("A long story. ", 60_000) + `"}]}`
	got, gone := make(chan struct{}), make(chan struct{})
	f := serve(t, nil, &replica{script: func(s *session) {
		s.request()
		close(got)
		s.closed()
		close(gone)
	}})
	ctx, leave := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(long))
	go func() {
		<-got
		leave()
	}()
	if _, err := f.client.Do(req); err == nil {
		t.Error("was answered")
	}
	<-gone
	f.settled()
	if all := len(long) / 256; f.blocks()[0] > all/2 {
		t.Errorf("index holds %d of %d blocks", f.blocks()[0], all)
	}
}
