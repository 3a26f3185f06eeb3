package proxy

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/relay"
)

func TestCommentsRemoved(t *testing.T) {
	for in, want := range map[string]string{
		"":                                "",
		"data: 1\n\n":                     "data: 1\n\n",
		": a\n\ndata: 1\n\n":              "data: 1\n\n",
		"data: 1\n\n: a\n\n: b\n\n":       "data: 1\n\n",
		"data: 1\n: a\ndata: 2\n\n":       "data: 1\ndata: 2\n\n",
		"data: 1\n\n\n\ndata: 2\n\n":      "data: 1\n\ndata: 2\n\n",
		": a\r\n\r\ndata: 1\r\n\r\n: b\r": "data: 1\r\n\r\n",
		"data: :1\nid: 2\n\n:":            "data: :1\nid: 2\n\n",
		"data: 1":                         "data: 1",
		":\n:\n":                          "",
		": a\r\rdata: 1\r\r\r: b\r":       "data: 1\r\r",
		"data: 1\r: a\rdata: 2\r\r\n\n":   "data: 1\rdata: 2\r\r\n",
	} {
		var s relay.Scanner
		if got := s.Scan([]byte(in)); string(got) != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

// FuzzCommentsRemoved asserts that what is kept does not depend on how the stream is split,
// has no comment, and has all other lines.
func FuzzCommentsRemoved(f *testing.F) {
	for _, seed := range []string{": a\n\ndata: 1\n\n", "data: 1\r\n: b\r\n\r\n:\r", "\n\n: x", "event: a\ndata: b\n\n\n: c\n\n"} {
		f.Add(seed, uint8(1))
	}
	f.Fuzz(func(t *testing.T, stream string, size uint8) {
		var all, parts relay.Scanner
		whole := all.Scan([]byte(stream))
		var got []byte
		for rest := []byte(stream); len(rest) > 0; {
			n := min(len(rest), 1+int(size))
			got = append(got, parts.Scan(bytes.Clone(rest[:n]))...)
			rest = rest[n:]
		}
		if !bytes.Equal(got, whole) {
			t.Fatalf("in parts %q, whole %q", got, whole)
		}
		fields := func(s string) (lines []string) {
			for line := range strings.SplitSeq(strings.ReplaceAll(s, "\r", "\n"), "\n") {
				if line != "" && line[0] != ':' {
					lines = append(lines, line)
				}
			}
			return lines
		}
		if got, want := strings.Join(fields(string(whole)), "\n"), strings.Join(fields(stream), "\n"); got != want {
			t.Fatalf("%q is %q: lines %q, want %q", stream, whole, got, want)
		}
		for line := range strings.SplitSeq(string(whole), "\n") {
			if strings.HasPrefix(line, ":") {
				t.Fatalf("%q has a comment", whole)
			}
		}
	})
}

func TestCommentsOfReplicaAreDropped(t *testing.T) {
	const ping = ": ping\n\n"
	f := serve(t, nil, &replica{script: once(sseHead, chunk(ping), chunk(role+ping), chunk(ping+hello+": pi"), chunk("ng\n\n"), chunk(ping),
		chunk(world+stop+ping+counted+doneLine+ping), lastChunk)})
	if _, answer := f.post("/v1/chat/completions", askStream); answer != goodStream {
		t.Errorf("got %q", answer)
	}
}

// The client's keep-alive events come also while the replica sends comments more often than that.
func TestKeepAliveDuringCommentsOfReplica(t *testing.T) {
	t.Parallel()
	over := make(chan struct{})
	f := serve(t, func(o *Options) { o.Keepalive = 50 * time.Millisecond }, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role+hello))
		s.commentUntil(over)
		s.say(chunk(world+stop+counted+doneLine), lastChunk)
	}})
	req, err := http.NewRequest(http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(askStream))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got strings.Builder
	for b := make([]byte, 4<<10); strings.Count(got.String(), ": keep-alive") < 2; {
		n, err := resp.Body.Read(b)
		if got.Write(b[:n]); err != nil {
			t.Fatalf("after %q: %v", got.String(), err)
		}
	}
	close(over)
	if rest, err := io.ReadAll(resp.Body); err != nil || !strings.HasSuffix(string(rest), doneLine) {
		t.Errorf("the rest is %q, %v", rest, err)
	}
	if strings.Contains(got.String(), ": ping") {
		t.Errorf("got %q", got.String())
	}
}

func TestStreamBeginningIsReserved(t *testing.T) {
	long := strings.Repeat("retry: 10\n\n", 30<<10) // 330 KiB
	said, over := make(chan struct{}), make(chan struct{})
	f := serve(t, nil, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(long))
		close(said)
		<-over
		s.say(chunk(goodStream), lastChunk)
	}})
	answered := make(chan string)
	go func() {
		_, answer, err := f.try("/v1/chat/completions", askStream)
		if err != nil {
			answer = err.Error()
		}
		answered <- answer
	}()
	<-said
	const want = 512<<10 - relay.FreeBufferBytes
	eventually(t, "the beginning is reserved", func() bool { return f.proxy.buffers.Reserved.Load() == want })
	close(over)
	if answer := <-answered; answer != long+goodStream {
		t.Errorf("got %d bytes", len(answer))
	}
}

func TestStreamBeginningWithoutMemory(t *testing.T) {
	f := serve(t, nil, &replica{script: once(sseHead, chunk(strings.Repeat("retry: 10\n\n", 30<<10)+goodStream), lastChunk)})
	if !f.proxy.buffers.Reserve(relay.MaxBufferedTotalBytes) {
		t.Fatal("the memory is in use")
	}
	defer f.proxy.buffers.Release(relay.MaxBufferedTotalBytes)
	if _, answer := f.post("/v1/chat/completions", askStream); !strings.HasSuffix(answer, goodStream) {
		t.Errorf("the stream ends in %q", answer[max(0, len(answer)-200):])
	}
}
