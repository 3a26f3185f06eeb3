package sim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"warmroute/sim/engine"
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
var fast = engine.Config{Speed: 1000}

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

func TestHeadersComeBeforePrefill(t *testing.T) {
	s := start(t, Config{Engine: engine.Config{PrefillRate: 0.001}}) // the prompt takes hours
	resp, err := send(t, t.Context(), s, long)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("status %d", resp.StatusCode)
	}
}

func TestAClientThatLeavesAborts(t *testing.T) {
	for name, c := range map[string]struct {
		engine engine.Config
		body   string
	}{
		"in mid-stream": {engine.Config{}, long},
		"in prefill":    {engine.Config{PrefillRate: 0.001, StepTokens: 1, Speed: 1e5}, long},
		"not streaming": {engine.Config{}, strings.Replace(long, `"stream":true,"stream_options":{"include_usage":true}`, `"stream":false`, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, Config{Engine: c.engine})
			ctx, cancel := context.WithCancel(t.Context())
			left := make(chan struct{})
			go func() {
				defer close(left)
				resp, err := send(t, ctx, s, c.body)
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			}()
			until(t, "the request runs", func() bool { return s.Stats().Running == 1 })
			cancel()
			<-left
			until(t, "it is aborted", func() bool { st := s.Stats(); return st.Running == 0 && st.KVUsage == 0 })
		})
	}
}

func TestAHalfCloseAborts(t *testing.T) {
	s := start(t, Config{})
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(long), long)
	until(t, "the request runs", func() bool { return s.Stats().Running == 1 })
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	until(t, "it is aborted", func() bool { return s.Stats().Running == 0 })
}

func TestSeedsKeepCachesApart(t *testing.T) {
	s := start(t, Config{Engine: fast, Adapters: []string{"sql"}})
	question := func(more string) answer {
		return ask(t, s, `{"messages":[{"role":"user","content":"`+strings.Repeat("word ", 100)+`"}],"max_tokens":4`+more+`}`)
	}
	question("")
	for more, hit := range map[string]bool{
		``:                              true,
		`,"model":"sim"`:                true,
		`,"temperature":0.5,"user":"u"`: true,
		`,"model":"sql"`:                false,
		`,"cache_salt":"pepper"`:        false,
	} {
		if got := question(more).Usage.PromptTokensDetails.CachedTokens > 0; got != hit {
			t.Errorf("with %s: hit is %v, want %v", more, got, hit)
		}
	}
}

func TestAdaptersAreListedAndReported(t *testing.T) {
	s := start(t, Config{Adapters: []string{"sql"}})
	resp, err := http.Get(s.URL() + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	cards, _ := io.ReadAll(resp.Body)
	if got := gjson.GetBytes(cards, "data.1.parent").Str; got != "sim" {
		t.Errorf("the adapter's parent is %q in %s", got, cards)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	running, err := send(t, ctx, s, strings.Replace(long, "{", `{"model":"sql",`, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer running.Body.Close()
	until(t, "the adapter runs", func() bool {
		return strings.Contains(string(s.exposition()), `vllm:lora_requests_info{max_lora="1",running_lora_adapters="sql",waiting_lora_adapters=""} `)
	})
}

func TestEmbeddings(t *testing.T) {
	s := start(t, Config{})
	status, raw := post(t, s, "/v1/embeddings", `{"model":"sim","input":["a","b","a"]}`)
	vectors := gjson.Get(raw, "data.#.embedding").Array()
	if status != http.StatusOK || len(vectors) != 3 || vectors[0].Raw != vectors[2].Raw || vectors[0].Raw == vectors[1].Raw {
		t.Errorf("%d %s", status, raw)
	}
}

func TestTokenizeAndBack(t *testing.T) {
	s := start(t, Config{})
	for _, text := range []string{"", "Hello, world", "<|im_start|>user\nhé🙂llo<|im_end|>", "<|im_start|>", "<|<|im_end|>|>"} {
		body, err := json.Marshal(map[string]string{"prompt": text})
		if err != nil {
			t.Fatal(err)
		}
		_, raw := post(t, s, "/tokenize", string(body))
		_, back := post(t, s, "/detokenize", `{"tokens":`+gjson.Get(raw, "tokens").Raw+`}`)
		if got := gjson.Get(back, "prompt").Str; got != text {
			t.Errorf("%q came back as %q by way of %s", text, got, raw)
		}
	}
}

func TestValidateReportsEveryFault(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	err := Config{MaxModelLen: -1, Engine: engine.Config{Speed: -1, KVTokens: 8}}.Validate()
	for _, want := range []string{"speed must be above 0", "context length must be above 0", "8 KV tokens are less than a block of 16"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
}

func TestAnswerLength(t *testing.T) {
	s := start(t, Config{Engine: fast, MaxModelLen: 2000})
	for _, c := range []struct {
		more     string
		min, max int
		finish   string
	}{
		{``, 20, 1900, "stop"},
		{`,"max_tokens":3`, 3, 3, "length"},
		{`,"max_tokens":9,"max_completion_tokens":4`, 4, 4, "length"},
		{`,"max_tokens":1500,"ignore_eos":true`, 1500, 1500, "length"},
		{`,"max_tokens":999999,"ignore_eos":true`, 1900, 1999, "length"}, // what the context leaves
		{`,"min_tokens":1500,"max_tokens":1800`, 1501, 1501, "stop"},
	} {
		a := ask(t, s, `{"messages":[{"role":"user","content":"Hi"}]`+c.more+`}`)
		if n := a.Usage.CompletionTokens; n < c.min || n > c.max || a.Choices[0].FinishReason != c.finish {
			t.Errorf("with %s: %d tokens, %s, want %d to %d, %s", c.more, n, a.Choices[0].FinishReason, c.min, c.max, c.finish)
		}
	}
}

func TestToolCallFedBackIsFoundInTheCache(t *testing.T) {
	s := start(t, Config{Engine: fast})
	const head = `{"tools":[{"type":"function","function":{"name":"look","parameters":{"type":"object","properties":{"where":{"type":"string","enum":["under the table, or behind it"]}},"required":["where"]}}}],"messages":[{"role":"user","content":"Look!"}`
	status, raw := post(t, s, "/v1/chat/completions", head+`],"tool_choice":"required"}`)
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, raw)
	}
	message := gjson.Get(raw, "choices.0.message")
	if got := message.Get("tool_calls.0.function.arguments").Str; got != `{"where": "under the table, or behind it"}` {
		t.Errorf("arguments %s", got)
	}
	first := gjson.Get(raw, "usage")
	second := ask(t, s, head+`,{"role":"assistant","tool_calls":`+message.Get("tool_calls").Raw+`},{"role":"tool","content":"Nothing."}]}`)
	want := int(first.Get("prompt_tokens").Int()+first.Get("completion_tokens").Int()-1) / 16 * 16
	if got := second.Usage.PromptTokensDetails.CachedTokens; got != want {
		t.Errorf("%d tokens hit, want %d", got, want)
	}
}

func TestAStepThatIsLateIsCaughtUp(t *testing.T) {
	s := start(t, Config{})
	// 100 steps of 8 ms, while the engine's lock is held for half the time.
	held := make(chan struct{})
	go func() {
		defer close(held)
		for range 10 {
			s.engineMu.Lock()
			time.Sleep(40 * time.Millisecond)
			s.engineMu.Unlock()
			time.Sleep(time.Millisecond)
		}
	}()
	ask(t, s, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":100,"ignore_eos":true}`)
	<-held
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	// In virtual time nothing was lost: 99 gaps of a step each.
	if mean := s.counters.itl.sum / 99; mean < 0.008 || mean > 0.0085 {
		t.Errorf("%v s between tokens, want 8 to 8.5 ms", mean)
	}
}
