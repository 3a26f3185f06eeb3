package vllmsim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs a replica until the test ends.
func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	s := NewServer(cfg)
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return s
}

// fast is an engine whose steps take next to no time.
var fast = EngineConfig{Speed: 1000}

func post(t *testing.T, s *Server, path, body string) (int, string) {
	t.Helper()
	resp, err := http.Post(s.URL()+path, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(answer)
}

// answer is the part of a chat answer that tests look at.
type answer struct {
	Choices []struct {
		FinishReason string `json:"finish_reason"`
		Message      struct{ Content string }
	}
	Usage struct {
		PromptTokens        int `json:"prompt_tokens"`
		CompletionTokens    int `json:"completion_tokens"`
		PromptTokensDetails struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func ask(t *testing.T, s *Server, body string) answer {
	t.Helper()
	status, raw := post(t, s, "/v1/chat/completions", body)
	if status != http.StatusOK {
		t.Fatalf("status %d: %s", status, raw)
	}
	var a answer
	if err := json.Unmarshal([]byte(raw), &a); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	return a
}

func TestAnswerFedBackIsFoundInTheCache(t *testing.T) {
	s := start(t, Config{Engine: fast})
	question := strings.Repeat("What do you make of this? ", 20)
	first := ask(t, s, `{"messages":[{"role":"user","content":"`+question+`"}],"max_tokens":200,"ignore_eos":true}`)
	reply, err := json.Marshal(first.Choices[0].Message.Content)
	if err != nil {
		t.Fatal(err)
	}
	second := ask(t, s, `{"messages":[{"role":"user","content":"`+question+`"},{"role":"assistant","content":`+string(reply)+`},`+
		`{"role":"user","content":"And then?"}],"max_tokens":10}`)
	// All of the first prompt and its answer but the last token, in whole blocks.
	want := (first.Usage.PromptTokens + 200 - 1) / 16 * 16
	if got := second.Usage.PromptTokensDetails.CachedTokens; got != want {
		t.Errorf("second turn hit %d tokens, want %d", got, want)
	}
}

func TestStreamHasRoleContentFinishUsageAndDone(t *testing.T) {
	s := start(t, Config{Engine: fast})
	resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(
		`{"messages":[{"role":"user","content":"Hi"}],"stream":true,"stream_options":{"include_usage":true},"max_tokens":30,"ignore_eos":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var events []string
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: ")); ok {
			events = append(events, string(data))
		}
	}
	if len(events) < 4 {
		t.Fatalf("only %d events: %q", len(events), events)
	}
	for i, want := range map[int]string{
		0:               `"delta":{"role":"assistant","content":""}`,
		1:               `"delta":{"content":"`,
		len(events) - 3: `"finish_reason":"length"`,
		len(events) - 2: `"choices":[],"usage":{"prompt_tokens":`,
		len(events) - 1: `[DONE]`,
	} {
		if !strings.Contains(events[i], want) {
			t.Errorf("event %d is %s, which lacks %s", i, events[i], want)
		}
	}
}
