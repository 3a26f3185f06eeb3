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
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"warmroute/lab/sim/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs a replica until the test ends.
func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	s := NewServer(cfg)
	if err := s.Bind("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	run(t, s)
	return s
}

// run runs a replica that is bound until the test ends.
func run(t *testing.T, s *Server) {
	t.Helper()
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
	response, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(response)
}

// response is the part of a chat response that tests look at.
type response struct {
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

func ask(t *testing.T, s *Server, body string) response {
	t.Helper()
	status, raw := post(t, s, "/v1/chat/completions", body)
	if status != http.StatusOK {
		t.Fatalf("status %d: %s", status, raw)
	}
	var a response
	if err := json.Unmarshal([]byte(raw), &a); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	return a
}

func TestOutputIsCached(t *testing.T) {
	s := start(t, Config{Engine: fast})
	question := strings.Repeat("What do you make of this? ", 20)
	first := ask(t, s, `{"messages":[{"role":"user","content":"`+question+`"}],"max_tokens":200,"ignore_eos":true}`)
	reply, err := json.Marshal(first.Choices[0].Message.Content)
	if err != nil {
		t.Fatal(err)
	}
	second := ask(t, s, `{"messages":[{"role":"user","content":"`+question+`"},{"role":"assistant","content":`+string(reply)+`},`+
		`{"role":"user","content":"And then?"}],"max_tokens":10}`)
	// All of the first prompt and its output but the last token, in whole blocks.
	want := (first.Usage.PromptTokens + 200 - 1) / 16 * 16
	if got := second.Usage.PromptTokensDetails.CachedTokens; got != want {
		t.Errorf("second turn hit %d tokens, want %d", got, want)
	}
}

func TestStreamChunks(t *testing.T) {
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

func TestHeadersBeforePrefill(t *testing.T) {
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

func TestClientDisconnectAborts(t *testing.T) {
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
			disconnected := make(chan struct{})
			go func() {
				defer close(disconnected)
				resp, err := send(t, ctx, s, c.body)
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			}()
			until(t, "the request runs", func() bool { return s.Stats().Running == 1 })
			cancel()
			<-disconnected
			until(t, "it is aborted", func() bool { st := s.Stats(); return st.Running == 0 && st.KVUsage == 0 })
		})
	}
}

func TestHalfCloseAborts(t *testing.T) {
	s := start(t, Config{})
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		len(long), long)
	until(t, "the request runs", func() bool { return s.Stats().Running == 1 })
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	until(t, "it is aborted", func() bool { return s.Stats().Running == 0 })
}

func TestCacheSalt(t *testing.T) {
	s := start(t, Config{Engine: fast, Adapters: []string{"sql"}})
	question := func(more string) response {
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

func TestAdapters(t *testing.T) {
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
		return strings.Contains(string(s.formatMetrics()),
			`vllm:lora_requests_info{max_lora="1",running_lora_adapters="sql",waiting_lora_adapters=""} `)
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

func TestTokenizeRoundTrip(t *testing.T) {
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

func TestValidate(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	err := Config{MaxModelLen: -1, Engine: engine.Config{Speed: -1, KVTokens: 8}}.Validate()
	for _, want := range []string{"speed must be above 0", "context length must be above 0", "KV tokens 8 are fewer than a block of 16"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
}

func TestOutputLength(t *testing.T) {
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
		{`,"max_tokens":2000,"ignore_eos":true`, 1900, 1999, "length"}, // what the context leaves
		{`,"min_tokens":1500,"max_tokens":1800`, 1501, 1501, "stop"},
	} {
		a := ask(t, s, `{"messages":[{"role":"user","content":"Hi"}]`+c.more+`}`)
		if n := a.Usage.CompletionTokens; n < c.min || n > c.max || a.Choices[0].FinishReason != c.finish {
			t.Errorf("with %s: %d tokens, %s, want %d to %d, %s", c.more, n, a.Choices[0].FinishReason, c.min, c.max, c.finish)
		}
	}
}

func TestToolCallIsCached(t *testing.T) {
	s := start(t, Config{Engine: fast})
	const head = `{"tools":[{"type":"function","function":{"name":"look","parameters":{"type":"object",` +
		`"properties":{"where":{"type":"string","enum":["under the table, or behind it"]}},"required":["where"]}}}],` +
		`"messages":[{"role":"user","content":"Look!"}`
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

func TestLateStepIsCaughtUp(t *testing.T) {
	s := start(t, Config{})
	// 100 steps of 5.07 ms, while the engine's lock is held for half the time.
	locked := make(chan struct{})
	go func() {
		defer close(locked)
		for range 10 {
			s.engineMu.Lock()
			time.Sleep(40 * time.Millisecond)
			s.engineMu.Unlock()
			time.Sleep(time.Millisecond)
		}
	}()
	ask(t, s, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":100,"ignore_eos":true}`)
	<-locked
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	// In virtual time nothing was lost: 99 gaps of a step each.
	if mean := s.ranks[0].counters.itl.sum / 99; mean < 0.005 || mean > 0.0055 {
		t.Errorf("%v s between tokens, want 5 to 5.5 ms", mean)
	}
}

// TestTwoThousandStreams makes tokens faster than they can be written, so
// that they are joined: none may be lost.
func TestTwoThousandStreams(t *testing.T) {
	const streams, tokens = 2000, 24
	s := start(t, Config{Engine: engine.Config{MaxSeqs: streams, Speed: 5}})
	transport := &http.Transport{MaxIdleConns: streams}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	var all sync.WaitGroup
	for i := range streams {
		all.Go(func() {
			body := fmt.Sprintf(`{"messages":[{"role":"user","content":"Question %d"}],"max_tokens":%d,"ignore_eos":true,`+
				`"stream":true,"stream_options":{"include_usage":true}}`, i, tokens)
			resp, err := client.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			text, last, counted := "", "", int64(0)
			lines := bufio.NewScanner(resp.Body)
			for lines.Scan() {
				if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
					last = data
					text += gjson.Get(data, "choices.0.delta.content").Str
					counted = max(counted, gjson.Get(data, "usage.completion_tokens").Int())
				}
			}
			if len(text) != tokens*tokenIDBytes || counted != tokens || last != "[DONE]" {
				t.Errorf("stream %d: %d bytes of text, usage of %d tokens, ends with %q, error %v", i, len(text), counted, last, lines.Err())
			}
		})
	}
	all.Wait()
	if st := s.Stats(); st.Running != 0 || st.Waiting != 0 || st.GenerationTokens != streams*tokens {
		t.Errorf("%d running, %d waiting, %d tokens generated, want 0, 0 and %d", st.Running, st.Waiting, st.GenerationTokens, streams*tokens)
	}
}

func TestLoadAndUnloadAdapters(t *testing.T) {
	s := start(t, Config{Engine: fast, Adapters: []string{"sql"}})
	f := func(path, body string, status int, want string) {
		t.Helper()
		if got, response := post(t, s, path, body); got != status || !strings.Contains(response, want) {
			t.Errorf("%s %s: %d %s, want %d and %q", path, body, got, response, status, want)
		}
	}
	listed := func(want string) {
		t.Helper()
		resp, err := http.Get(s.URL() + "/v1/models")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		cards, _ := io.ReadAll(resp.Body)
		got := ""
		for _, card := range gjson.GetBytes(cards, "data").Array() {
			got += fmt.Sprintf("%s<%s@%s ", card.Get("id").Str, card.Get("parent").Str, card.Get("root").Str)
		}
		if got != want {
			t.Errorf("listed are %s, want %s", got, want)
		}
	}
	ask := func(model string, status int) {
		t.Helper()
		f("/v1/chat/completions", `{"model":"`+model+`","messages":[{"role":"user","content":"Hi"}],"max_tokens":2}`, status, "")
	}
	const load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

	ask("chat", 404)
	f(load, `{"lora_name":"chat","lora_path":"/adapters/chat"}`, 200, "Success: LoRA adapter 'chat' added successfully.")
	ask("chat", 200)
	listed("sim<@/models/sim sql<sim@/models/sql chat<sim@/adapters/chat ")
	f(load, `{"lora_name":"chat","lora_path":"/b"}`, 400, "has already been loaded")
	f(load, `{"lora_name":"chat","lora_path":"/b","load_inplace":true}`, 200, "")
	listed("sim<@/models/sim sql<sim@/models/sql chat<sim@/b ")
	f(load, `{"lora_name":"x"}`, 400, `"type":"InvalidUserInput"`)
	f(unload, `{"lora_name":"sql"}`, 200, "Success: LoRA adapter 'sql' removed successfully.")
	listed("sim<@/models/sim chat<sim@/b ")
	ask("sql", 404)
	f(unload, `{"lora_name":"sql"}`, 404, "The lora adapter 'sql' cannot be found.")
	f(unload, `{}`, 400, "'lora_name'")
	f(unload, `[]`, 400, "")
}

// messagesUsage is what a message said of its prompt.
type messagesUsage struct{ input, created, read int64 }

func readMessagesUsage(v gjson.Result) messagesUsage {
	return messagesUsage{v.Get("input_tokens").Int(), v.Get("cache_creation_input_tokens").Int(), v.Get("cache_read_input_tokens").Int()}
}

func (u messagesUsage) prompt() int64 { return u.input + u.created + u.read }

// TestMessagesUsage compares the figures of /v1/messages with those of a chat with
// the same prompt, as a real vLLM gave them and as the simulated replica does.
func TestMessagesUsage(t *testing.T) {
	const blockSize = 32
	s := start(t, Config{Model: "tiny", Engine: engine.Config{BlockSize: blockSize, KVTokens: 16384, Speed: 1000}})
	responses := map[string]func(name string) string{
		"vLLM 0.32": func(name string) string {
			raw, err := os.ReadFile(filepath.Join("testdata/vllm-0.32", name+".http"))
			if err != nil {
				t.Fatal(err)
			}
			return string(raw)
		},
		"simulated": func(name string) string {
			raw, err := os.ReadFile(filepath.Join("testdata/vllm-0.32", name+".http"))
			if err != nil {
				t.Fatal(err)
			}
			request, _, _ := strings.Cut(string(raw), "\n=== response ===\n")
			return string(exchange(t, s, []byte(request)).body)
		},
	}
	for what, response := range responses {
		t.Run(what, func(t *testing.T) {
			usage := func(name, before string) gjson.Result {
				text := response(name)
				return gjson.Parse(text[strings.LastIndex(text, before)+len(before):])
			}
			uncached := readMessagesUsage(usage("messages-uncached", `"usage":`))
			cached := readMessagesUsage(usage("messages-cached", `"usage":`))
			chat := usage("messages-cached-chat", `"usage":`)
			stream := response("messages-cached-stream")
			_, begin, _ := strings.Cut(stream, `"usage":`)
			first := readMessagesUsage(gjson.Parse(begin))
			last := readMessagesUsage(gjson.Parse(stream[strings.LastIndex(stream, `"usage":`)+len(`"usage":`):]))

			prompt, hit := chat.Get("prompt_tokens").Int(), chat.Get("prompt_tokens_details.cached_tokens").Int()
			full := prompt / blockSize * blockSize
			if hit != full || cached != (messagesUsage{prompt - hit, 0, hit}) {
				t.Errorf("cached: %+v, where a chat has %d tokens, %d of them cached", cached, prompt, hit)
			}
			if uncached.prompt() != prompt || uncached.created != full-uncached.read || uncached.created == 0 {
				t.Errorf("not cached: %+v, where a chat has %d tokens", uncached, prompt)
			}
			if first != (messagesUsage{input: prompt}) || last != cached {
				t.Errorf("a stream begins with %+v and ends with %+v; a whole message has %+v", first, last, cached)
			}
		})
	}
}

func TestMessagesUsageWithoutTokenDetails(t *testing.T) {
	s := start(t, Config{NoTokenDetails: true, Engine: fast})
	_, body := post(t, s, "/v1/messages", `{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"`+strings.Repeat("word ", 100)+
		`"}]}`)
	u := gjson.Get(body, "usage")
	if u.Get("input_tokens").Int() < 100 || u.Get("cache_read_input_tokens").Exists() || u.Get("cache_creation_input_tokens").Exists() {
		t.Errorf("usage %s", u.Raw)
	}
}

// FuzzChatBody looks for bodies that crash the reading of a chat request. What
// it accepts has to have a prompt.
func FuzzChatBody(f *testing.F) {
	for _, body := range []string{
		``, `{`, `[]`, `"x"`, `{"a":`, `{"messages":3}`, `{"messages":[]}`, `{"messages":[null]}`, `{"messages":[{"role":1}]}`,
		short, stream, `{"messages":[{"role":"user","content":"\ud800"}]}`, `{"model":"a","model":"sim","messages":[{"role":"user"}]}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]}`,
		`{"messages":[{"role":"system","content":"<|im_start|>"},{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{}}}]}],` +
			`"tools":[{"function":{"name":"f","parameters":{"type":"object","required":["a"]}}}],"tool_choice":"required"}`,
		strings.Repeat("[", 20_000), strings.Repeat(`{"a":`, 20_000),
	} {
		f.Add([]byte(body))
	}
	s := NewServer(Config{})
	f.Fuzz(func(t *testing.T, body []byte) {
		r := httptest.NewRequest("POST", "/v1/chat/completions", strings.NewReader(string(body)))
		r.Header.Set("Content-Type", "application/json")
		in, err := readBody(r)
		if err != nil {
			return
		}
		if _, prompt, _, err := s.readChat(in); err == nil && len(prompt) == 0 {
			t.Error("no prompt")
		}
	})
}

func FuzzTokenize(f *testing.F) {
	for _, text := range []string{"", "abcd", "abcde", "<|im_start|>user\nhi<|im_end|>\n", "<|<|endoftext|>", "é🙂"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if !utf8.ValidString(text) || strings.Contains(text, "\x00") {
			return // indistinguishable from the padding of a short token
		}
		for bytes := tokenizer(1); bytes <= tokenIDBytes; bytes++ {
			if got := detokenize(bytes.tokenize([]byte(text), nil)); got != text {
				t.Errorf("%q became %q with %d bytes per token", text, got, bytes)
			}
		}
	})
}

// As vLLM 0.32 with Starlette 1.10.
func TestCORS(t *testing.T) {
	s := start(t, Config{APIKey: "key"})
	ask := func(method, path string, headers ...string) *http.Response {
		req, err := http.NewRequest(method, s.URL()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp
	}
	preflight := ask("OPTIONS", "/v1/chat/completions", "Origin", "https://a.example", "Access-Control-Request-Method", "POST",
		"Access-Control-Request-Headers", "authorization")
	for name, want := range map[string]string{
		"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY",
		"Access-Control-Allow-Headers": "authorization", "Access-Control-Max-Age": "600", "Access-Control-Allow-Credentials": "",
	} {
		if got := preflight.Header.Get(name); preflight.StatusCode != 200 || got != want {
			t.Errorf("preflight: status %d, %s: %q, want %q", preflight.StatusCode, name, got, want)
		}
	}
	for path, want := range map[string]string{"/health": "*", "/v1/models": ""} { // the second lacks the key
		if got := ask("GET", path, "Origin", "https://a.example").Header.Get("Access-Control-Allow-Origin"); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	if h := ask("GET", "/health").Header; h["Access-Control-Allow-Origin"] != nil || h.Get("Vary") != "Origin" {
		t.Errorf("without an origin: %v", h)
	}
	http.DefaultClient.CloseIdleConnections()
}
