package sim

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"warmroute/lab/sim/engine"
)

// TestLikeVLLM sends what was sent to a real vLLM 0.32 and compares the responses:
// errors but those of validation to the byte, all others by status, headers and shape.
func TestLikeVLLM(t *testing.T) {
	files, err := filepath.Glob("testdata/vllm-0.32/*.http")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	cfg := Config{Model: "tiny", MaxModelLen: 8192, Engine: engine.Config{BlockSize: 32, KVTokens: 16384, Speed: 1000}}
	open := start(t, cfg)
	cfg.APIKey = "sk-golden"
	keyed := start(t, cfg)

	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".http")
		t.Run(name, func(t *testing.T) {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			request, golden, ok := bytes.Cut(raw, []byte("\n=== response ===\n"))
			if !ok {
				t.Fatal("no response in the file")
			}
			s := open
			switch {
			case strings.HasPrefix(name, "keyed-"):
				s = keyed
			case strings.HasPrefix(name, "abort-early-"):
				set(t, s, Fault{Kind: AbortEach, Requests: 1})
			case strings.HasPrefix(name, "abort-"):
				set(t, s, Fault{Kind: AbortEach, Chunks: 3, Requests: 1})
			}
			got := exchange(t, s, request)
			if name == "chat-eos-stream" { // the real model was made to end its turn before it said anything
				got.body = contentChunk.ReplaceAll(got.body, nil)
			}
			compare(t, parse(t, golden), got)
		})
	}
}

var contentChunk = regexp.MustCompile(`data: .*"delta":\{"content":".*"finish_reason":null.*\n\n`)

// recorded is a response with its framing undone.
type recorded struct {
	status string
	header http.Header
	body   []byte
}

// parse reads a golden response. Its body was stored without its framing.
func parse(t *testing.T, raw []byte) recorded {
	t.Helper()
	head, body, _ := bytes.Cut(raw, []byte("\r\n\r\n"))
	lines := strings.Split(string(head), "\r\n")
	r := recorded{status: lines[0], header: make(http.Header), body: body}
	for _, line := range lines[1:] {
		key, value, _ := strings.Cut(line, ": ")
		r.header.Add(key, value)
	}
	return r
}

func exchange(t *testing.T, s *Server, request []byte) recorded {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(request); err != nil {
		t.Fatal(err)
	}
	method, _, _ := strings.Cut(string(request), " ")
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return recorded{"HTTP/1.1 " + resp.Status, resp.Header, body}
}

func compare(t *testing.T, want, got recorded) {
	t.Helper()
	if got.status != want.status {
		t.Fatalf("status %q, vLLM has %q; body %s", got.status, want.status, got.body)
	}
	for _, h := range []http.Header{want.header, got.header} {
		// Framing, and what depends on it.
		for _, key := range []string{"Date", "Content-Length", "Transfer-Encoding", "Connection"} {
			h.Del(key)
		}
	}
	if g, w := fmt.Sprint(got.header), fmt.Sprint(want.header); g != w {
		t.Errorf("headers %s\n vLLM has %s", g, w)
	}
	kind := want.header.Get("Content-Type")
	switch {
	case strings.HasPrefix(kind, "text/event-stream"):
		compareStreams(t, got.body, want.body)
	case strings.HasPrefix(kind, "text/plain"):
		compareMetrics(t, got.body, want.body)
	case strings.Contains(want.status, " 200 ") && len(want.body) > 0, bytes.Contains(want.body, []byte(`"type":"Bad Request"`)):
		equal(t, shape(t, got.body), shape(t, want.body))
	default:
		equal(t, string(got.body), string(want.body))
	}
}

func equal(t *testing.T, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("got\n%s\nvLLM has\n%s", got, want)
	}
}

// compareStreams wants every kind of event of ours to be one of vLLM's, in the
// same order. Only chunks in the midst of a response may be missing, because
// both join tokens when the reader is slow.
func compareStreams(t *testing.T, got, want []byte) {
	t.Helper()
	ours, theirs := events(t, got), events(t, want)
	for _, event := range theirs {
		switch {
		case len(ours) > 0 && ours[0] == event:
			ours = ours[1:]
		case strings.Contains(event, "output_text.delta"), strings.Contains(event, "content:string},\n logprobs:<nil>,\n finish_reason:<nil>"),
			strings.Contains(event, "text:string,\n logprobs:<nil>,\n finish_reason:<nil>"):
		default:
			t.Errorf("vLLM sends\n%s\nwhere we send\n%s", event, strings.Join(ours, "\n\n"))
			return
		}
	}
	if len(ours) > 0 {
		t.Errorf("vLLM does not send\n%s", strings.Join(ours, "\n\n"))
	}
}

// events are the shapes of a stream's events, each once. The last chunk of a
// choice counts as the same with and without text, which is a matter of timing.
func events(t *testing.T, body []byte) []string {
	t.Helper()
	var all []string
	for event := range strings.SplitSeq(string(body), "\n\n") {
		var lines []string
		for line := range strings.SplitSeq(event, "\n") {
			if data, ok := strings.CutPrefix(line, "data: {"); ok {
				line = "data: " + shape(t, []byte("{"+data))
			}
			lines = append(lines, line)
		}
		whole := strings.Join(lines, "\n")
		if strings.Contains(whole, "finish_reason:") && !strings.Contains(whole, "finish_reason:<nil>") {
			whole = strings.Replace(whole, "delta:{content:string}", "delta:{}", 1)
		}
		if !slices.Contains(all, whole) {
			all = append(all, whole)
		}
	}
	return all
}

// telling are the members whose value, not only its type, has to be equal.
var telling = regexp.MustCompile(
	`^(object|role|type|finish_reason|stop_reason|owned_by|status|version|name|success|parent|max_model_len|reason)$`)

// shape is JSON with the values of most members replaced by their types, and
// elements of equal shape in a row taken as one.
func shape(t *testing.T, raw []byte) string {
	t.Helper()
	in := json.NewDecoder(bytes.NewReader(raw))
	in.UseNumber()
	out, err := shapeOf(in, "")
	if err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	return out
}

func shapeOf(in *json.Decoder, key string) (string, error) {
	token, err := in.Token()
	if err != nil {
		return "", err
	}
	delimiter, ok := token.(json.Delim)
	if !ok {
		if telling.MatchString(key) {
			return fmt.Sprintf("%v", token), nil
		}
		return fmt.Sprintf("%T", token), nil
	}
	var parts []string
	for in.More() {
		name := ""
		if delimiter == '{' {
			token, err := in.Token()
			if err != nil {
				return "", err
			}
			name = token.(string)
		}
		part, err := shapeOf(in, name)
		if err != nil {
			return "", err
		}
		if name != "" {
			part = name + ":" + part
		}
		parts = append(parts, part)
	}
	_, err = in.Token()
	return delimiter.String() + strings.Join(slices.Compact(parts), ",\n ") + string(delimiter+2), err
}

// compareMetrics wants every series of ours to be one of vLLM's, with labels of
// the same names in the same order.
func compareMetrics(t *testing.T, got, want []byte) {
	t.Helper()
	known := series(want)
	ours := series(got)
	if len(ours) < 40 {
		t.Errorf("only %d series", len(ours))
	}
	for name, labels := range ours {
		theirs, ok := known[name]
		switch {
		case !ok:
			t.Errorf("vLLM has no series %s", name)
		case name == "vllm:cache_config_info":
			for _, l := range labels {
				if !slices.Contains(theirs, l) {
					t.Errorf("vLLM's %s has no label %s", name, l)
				}
			}
		case !slices.Equal(labels, theirs):
			t.Errorf("%s has labels %v, vLLM's has %v", name, labels, theirs)
		}
	}
}

var label = regexp.MustCompile(`([a-z_]+)="`)

func series(text []byte) map[string][]string {
	found := make(map[string][]string)
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, _ := strings.Cut(strings.TrimSpace(line), "{")
		name, _, _ = strings.Cut(name, " ")
		labels := []string{}
		for _, m := range label.FindAllStringSubmatch(rest, -1) {
			labels = append(labels, m[1])
		}
		found[name] = labels
	}
	return found
}
