// Package sdk tests an old version of OpenAI's SDK, which needs a module of its own. WARMROUTE is the
// program to start.
package sdk

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

// silence is several times what the proxy waits before a keep-alive event.
const silence = 500 * time.Millisecond

// serveSlowly answers as a replica that is silent before the header, the first token and the second one,
// and sends a comment of its own.
func serveSlowly(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/v1/models":
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","root":"m","parent":null}]}`)
	case "/v1/chat/completions":
		io.Copy(io.Discard, r.Body)
		time.Sleep(silence)
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for _, text := range []string{"Hel", "lo"} {
			w.(http.Flusher).Flush()
			time.Sleep(silence)
			fmt.Fprintf(w, "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"model\":\"m\","+
				"\"choices\":[{\"index\":0,\"delta\":{\"content\":%q},\"finish_reason\":null}]}\n\n: ping\r\n\r\n", text)
		}
		io.WriteString(w, "data: [DONE]\n\n")
	}
}

// recordingTransport keeps what a client reads.
type recordingTransport struct{ read bytes.Buffer }

func (c *recordingTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.TeeReader(resp.Body, &c.read), resp.Body}
	}
	return resp, err
}

// freeAddresses returns two addresses on which nothing listens.
func freeAddresses(t *testing.T) (free [2]string) {
	for i := range free {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close() // not before the other one has its port
		free[i] = l.Addr().String()
	}
	return free
}

// startProxy starts a proxy in front of a replica, and returns its URL once it is ready.
func startProxy(t *testing.T, replica string) string {
	free := freeAddresses(t)
	config := filepath.Join(t.TempDir(), "warmroute.yaml")
	text := fmt.Sprintf("listen: %s\nadmin: %s\nbackends: [%s]\nsse: {keepalive: 100ms, queue_keepalive: 100ms}\n", free[0], free[1], replica)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	proxy := exec.Command(os.Getenv("WARMROUTE"), "serve", "--config", config)
	if err := proxy.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		proxy.Process.Kill()
		proxy.Wait()
	})
	url := "http://" + free[0]
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if resp, err := http.Get(url + "/readyz"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return url
			}
		}
		if time.Now().After(end) {
			t.Fatal("the proxy did not become ready within 30 s")
		}
	}
}

func TestStreamWithKeepAlives(t *testing.T) {
	replica := httptest.NewServer(http.HandlerFunc(serveSlowly))
	defer replica.Close()
	url := startProxy(t, replica.URL)
	transport := new(recordingTransport)
	client := openai.NewClient(option.WithBaseURL(url+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0),
		option.WithHTTPClient(&http.Client{Transport: transport}))
	stream := client.Chat.Completions.NewStreaming(t.Context(), openai.ChatCompletionNewParams{
		Model: "m", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hello")}})
	defer stream.Close()
	var text strings.Builder
	for stream.Next() {
		text.WriteString(stream.Current().Choices[0].Delta.Content)
	}
	if err := stream.Err(); err != nil || text.String() != "Hello" {
		t.Errorf("got %q and the error %v", text.String(), err)
	}
	read := transport.read.String()
	before, after, _ := strings.Cut(read, "data:")
	for _, part := range []string{before, after} {
		if !strings.Contains(part, ": keep-alive\n") {
			t.Errorf("no keep-alive event in %q of %q", part, read)
		}
	}
}
