package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// sdkFleet is three replicas behind a proxy, and OpenAI's SDK in front of it.
type sdkFleet struct {
	client   openai.Client
	model    string
	replicas []string // base URLs
	admin    string   // base URL of the proxy's admin listener

	// kill ends the last replica at once, as if its process had died; restart
	// brings it back on the same address.
	kill, restart func()
}

// test runs everything that an SDK's user relies on. The replica that dies comes
// last, since a restarted one starts with a cold cache.
func (f *sdkFleet) test(t *testing.T) {
	t.Run("answer with usage", f.answerWithUsage)
	t.Run("stream with usage", f.streamWithUsage)
	t.Run("stream without usage", f.streamWithoutUsage)
	t.Run("the next turn finds its prefix", f.nextTurnFindsItsPrefix)
	t.Run("tool call and its result", f.toolCallAndResult)
	t.Run("streamed tool call", f.streamedToolCall)
	t.Run("models", f.models)
	t.Run("completions", f.completions)
	t.Run("responses", f.responses)
	t.Run("the next turn of a response finds its prefix", f.nextResponseFindsItsPrefix)
	t.Run("tool call of a response and its result", f.responseToolCall)
	t.Run("unknown model", f.unknownModel)
	t.Run("prompt longer than the context", f.promptTooLong)
	t.Run("body that is not JSON", f.notJSON)
	t.Run("unknown path", f.unknownPath)
	t.Run("a client leaves in mid-stream", f.leaveInMidStream)
	t.Run("a client leaves a plain request", f.leavePlainRequest)
	t.Run("a replica is killed under load", f.replicaKilled)
}

func TestSDKInFrontOfSimulatedReplicas(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before, ignoreCleaner) })

	// As large as the real replicas that the same tests run against.
	config := sim.Config{Engine: engine.Config{KVTokens: 16_384}, MaxModelLen: 8192}
	f := &sdkFleet{model: "sim"}
	for range 2 {
		url, _ := startSimReplica(t, config, "127.0.0.1:0")
		f.replicas = append(f.replicas, url)
	}
	victim, kill := startSimReplica(t, config, "127.0.0.1:0")
	f.replicas = append(f.replicas, victim)
	f.kill = kill
	f.restart = func() { startSimReplica(t, config, strings.TrimPrefix(victim, "http://")) }
	f.startProxy(t)
	f.test(t)
}

// startProxy puts a proxy with the default settings in front of the replicas,
// and the SDK in front of the proxy.
func (f *sdkFleet) startProxy(t *testing.T) {
	t.Helper()
	proxy, _ := startServer(t, f.replicas...)
	f.admin = "http://" + proxy.AdminAddr().String()

	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	f.client = openai.NewClient(
		option.WithBaseURL("http://"+proxy.Addr().String()+"/v1"),
		option.WithAPIKey("none"),
		option.WithHTTPClient(&http.Client{Transport: transport}),
		option.WithMaxRetries(0), // what fails must be seen to fail
	)
	f.eventually(t, "all replicas ready", func() bool {
		return f.proxyMetric(t, "warmroute_backend_ready") == float64(len(f.replicas))
	})
}

// eventually waits for a state that must come; the bound is only there for a run that is broken.
func (f *sdkFleet) eventually(t *testing.T, what string, reached func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !reached(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// running is the number of requests that replicas compute or queue.
func running(t *testing.T, replicas ...string) (sum float64) {
	t.Helper()
	for _, url := range replicas {
		sum += metricSum(t, url, "vllm:num_requests_running") + metricSum(t, url, "vllm:num_requests_waiting")
	}
	return sum
}

// generated is the number of tokens that the replicas have produced so far.
func (f *sdkFleet) generated(t *testing.T) (sum float64) {
	t.Helper()
	for _, url := range f.replicas {
		sum += metricSum(t, url, "vllm:generation_tokens_total")
	}
	return sum
}

func (f *sdkFleet) proxyMetric(t *testing.T, name string) float64 {
	t.Helper()
	return metricSum(t, f.admin, name)
}

// metricSum returns the sum of a gauge's or counter's series that have all of
// the values as labels.
func metricSum(t *testing.T, url, name string, labels ...string) (sum float64) {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range families[name].GetMetric() {
		var values []string
		for _, l := range m.GetLabel() {
			values = append(values, l.GetValue())
		}
		if slices.ContainsFunc(labels, func(want string) bool { return !slices.Contains(values, want) }) {
			continue
		}
		sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
	}
	return sum
}

// words returns text that no earlier request has left in a cache.
func words(n int) string {
	vocabulary := strings.Fields("river stone copper lantern meadow signal harbor violet engine winter paper orbit")
	var b strings.Builder
	for range n {
		b.WriteString(vocabulary[rand.IntN(len(vocabulary))] + " ")
	}
	return fmt.Sprint(b.String(), rand.Uint64())
}

// port is the last part of a replica's address, which its backend's name ends in as well.
func port(t *testing.T, url string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// chat is a new conversation whose system prompt has so many words, to be
// answered with exactly so many tokens.
func (f *sdkFleet) chat(promptWords int, outputTokens int64) openai.ChatCompletionNewParams {
	p := openai.ChatCompletionNewParams{
		Model:     f.model,
		MaxTokens: openai.Int(outputTokens),
		Messages: []openai.ChatCompletionMessageParamUnion{
			openai.SystemMessage(words(promptWords)), openai.UserMessage(words(10)),
		},
	}
	p.SetExtraFields(map[string]any{"ignore_eos": true})
	return p
}

// streamed is what a stream said.
type streamed struct {
	text, finish string
	chunks       int
	usage        openai.CompletionUsage
	toolName     string
	toolArgs     string
	header       http.Header
}

// stream plays a stream to its end. What it returns is valid with an error, too.
func (f *sdkFleet) stream(t *testing.T, p openai.ChatCompletionNewParams) (got streamed, err error) {
	var resp *http.Response
	s := f.client.Chat.Completions.NewStreaming(t.Context(), p, option.WithResponseInto(&resp))
	defer s.Close()
	if resp != nil {
		got.header = resp.Header
	}
	for s.Next() {
		chunk := s.Current()
		got.chunks++
		if chunk.JSON.Usage.Valid() {
			got.usage = chunk.Usage
		}
		for _, c := range chunk.Choices {
			got.text += c.Delta.Content
			got.finish += c.FinishReason
			for _, call := range c.Delta.ToolCalls {
				got.toolName += call.Function.Name
				got.toolArgs += call.Function.Arguments
			}
		}
	}
	return got, s.Err()
}

func (f *sdkFleet) answerWithUsage(t *testing.T) {
	answer, err := f.client.Chat.Completions.New(t.Context(), f.chat(20, 12))
	if err != nil {
		t.Fatal(err)
	}
	if c := answer.Choices[0]; c.FinishReason != "length" || c.Message.Content == "" {
		t.Errorf("got %s", answer.RawJSON())
	}
	if u := answer.Usage; u.CompletionTokens != 12 || u.TotalTokens != u.PromptTokens+12 {
		t.Errorf("got usage %s", u.RawJSON())
	}
}

func (f *sdkFleet) streamWithUsage(t *testing.T) {
	p := f.chat(20, 12)
	p.StreamOptions.IncludeUsage = openai.Bool(true)
	got, err := f.stream(t, p)
	if err != nil {
		t.Fatal(err)
	}
	if got.text == "" || got.finish != "length" || got.usage.CompletionTokens != 12 {
		t.Errorf("got %+v", got)
	}
}

func (f *sdkFleet) streamWithoutUsage(t *testing.T) {
	got, err := f.stream(t, f.chat(20, 12))
	if err != nil {
		t.Fatal(err)
	}
	if got.finish != "length" || got.usage.TotalTokens != 0 {
		t.Errorf("got %+v", got)
	}
}

func (f *sdkFleet) nextTurnFindsItsPrefix(t *testing.T) {
	p := f.chat(120, 16)
	p.StreamOptions.IncludeUsage = openai.Bool(true)
	var home string
	for turn := range 3 {
		got, err := f.stream(t, p)
		if err != nil {
			t.Fatal(err)
		}
		backend, match := got.header.Get("X-Warmroute-Backend"), got.header.Get("X-Warmroute-Predicted-Tokens")
		if turn > 0 {
			if backend != home {
				t.Errorf("turn %d went to %s, the one before to %s, and both were idle", turn, backend, home)
			}
			if got.usage.PromptTokensDetails.CachedTokens == 0 {
				t.Errorf("turn %d found nothing in the cache of %s", turn, backend)
			}
			if matched, _, _ := strings.Cut(match, "/"); matched == "0" || matched == "" {
				t.Errorf("turn %d has the prefix match %q", turn, match)
			}
		}
		home = backend
		p.Messages = append(p.Messages, openai.AssistantMessage(got.text), openai.UserMessage(words(10)))
		f.awaitIdle(t)
	}
}

// withTool makes the model call a tool: weights are random, so it never does by itself.
func withTool(p openai.ChatCompletionNewParams) openai.ChatCompletionNewParams {
	p.SetExtraFields(nil)
	p.Temperature = openai.Float(0)
	p.ToolChoice.OfAuto = openai.String("required")
	p.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
		Name: "weather",
		Parameters: shared.FunctionParameters{
			"type":       "object",
			"properties": map[string]any{"city": map[string]any{"type": "string"}},
			"required":   []string{"city"},
		},
	})}
	return p
}

func (f *sdkFleet) toolCallAndResult(t *testing.T) {
	p := withTool(f.chat(80, 300))
	answer, err := f.client.Chat.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	message := answer.Choices[0].Message
	if len(message.ToolCalls) != 1 || message.ToolCalls[0].Function.Name != "weather" {
		t.Fatalf("got %s", answer.RawJSON())
	}
	if !json.Valid([]byte(message.ToolCalls[0].Function.Arguments)) {
		t.Errorf("arguments %q", message.ToolCalls[0].Function.Arguments)
	}

	p.Messages = append(p.Messages, message.ToParam(), openai.ToolMessage(`{"degrees":21}`, message.ToolCalls[0].ID))
	p.ToolChoice.OfAuto, p.MaxTokens = openai.String("auto"), openai.Int(8)
	answer, err = f.client.Chat.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if answer.Usage.PromptTokensDetails.CachedTokens == 0 {
		t.Error("the turn with the tool's result found nothing in the cache")
	}
}

func (f *sdkFleet) streamedToolCall(t *testing.T) {
	got, err := f.stream(t, withTool(f.chat(80, 300)))
	if err != nil {
		t.Fatal(err)
	}
	if got.toolName != "weather" || got.finish != "tool_calls" || !json.Valid([]byte(got.toolArgs)) {
		t.Errorf("got %+v", got)
	}
}

func (f *sdkFleet) models(t *testing.T) {
	page, err := f.client.Models.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Data) != 1 || page.Data[0].ID != f.model {
		t.Fatalf("got %s", page.RawJSON())
	}
	// vLLM's own field, which OpenAI's API does not have.
	if n, err := strconv.Atoi(page.Data[0].JSON.ExtraFields["max_model_len"].Raw()); n != 8192 {
		t.Errorf("max_model_len %d, %v in %s", n, err, page.RawJSON())
	}
	if _, err := f.client.Models.Get(t.Context(), f.model); err != nil {
		t.Error(err)
	}
	var apiErr *openai.Error
	if _, err := f.client.Models.Get(t.Context(), "nobody"); !errors.As(err, &apiErr) || apiErr.StatusCode != http.StatusNotFound {
		t.Errorf("a model nobody serves: %v", err)
	}
}

func (f *sdkFleet) completions(t *testing.T) {
	p := openai.CompletionNewParams{
		Model:     openai.CompletionNewParamsModel(f.model),
		Prompt:    openai.CompletionNewParamsPromptUnion{OfString: openai.String(words(20))},
		MaxTokens: openai.Int(12),
	}
	p.SetExtraFields(map[string]any{"ignore_eos": true}) // the first token may be the end
	answer, err := f.client.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if answer.Choices[0].Text == "" {
		t.Errorf("got %s", answer.RawJSON())
	}
}

// response is the request for a new conversation whose instructions have so many words.
func (f *sdkFleet) response(instructionWords int, maxTokens int64) responses.ResponseNewParams {
	p := responses.ResponseNewParams{
		Model:           f.model,
		Instructions:    openai.String(words(instructionWords)),
		Input:           responses.ResponseNewParamsInputUnion{OfInputItemList: responses.ResponseInputParam{userItem(words(10))}},
		MaxOutputTokens: openai.Int(maxTokens),
	}
	p.SetExtraFields(map[string]any{"ignore_eos": true})
	return p
}

func userItem(text string) responses.ResponseInputItemUnionParam {
	return responses.ResponseInputItemParamOfMessage(text, responses.EasyInputMessageRoleUser)
}

// streamedResponse is what the stream of a response said.
type streamedResponse struct {
	text, arguments string
	last            responses.ResponseStreamEventUnion
}

// streamResponse plays a stream to its end. What it returns is valid with an error, too.
func (f *sdkFleet) streamResponse(t *testing.T, p responses.ResponseNewParams) (got streamedResponse, err error) {
	s := f.client.Responses.NewStreaming(t.Context(), p)
	defer s.Close()
	for s.Next() {
		got.last = s.Current()
		switch got.last.Type {
		case "response.output_text.delta":
			got.text += got.last.Delta
		case "response.function_call_arguments.delta":
			got.arguments += got.last.Delta
		}
	}
	return got, s.Err()
}

func (f *sdkFleet) responses(t *testing.T) {
	p := f.response(20, 16)
	p.Temperature = openai.Float(0)
	answer, err := f.client.Responses.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if answer.OutputText() == "" {
		t.Errorf("got %s", answer.RawJSON())
	}
	got, err := f.streamResponse(t, p)
	if err != nil || got.text != answer.OutputText() || got.last.Type != "response.completed" {
		t.Errorf("the stream says %q and ends with %q, %v; the whole response says %q", got.text, got.last.Type, err, answer.OutputText())
	}

	p.Model = "nobody"
	_, err = f.client.Responses.New(t.Context(), p)
	expectError(t, err, http.StatusNotFound)
	_, err = f.streamResponse(t, p)
	expectError(t, err, http.StatusNotFound)
}

func (f *sdkFleet) nextResponseFindsItsPrefix(t *testing.T) {
	p := f.response(120, 16)
	var first string
	for turn := range 3 {
		var resp *http.Response
		answer, err := f.client.Responses.New(t.Context(), p, option.WithResponseInto(&resp))
		if err != nil {
			t.Fatal(err)
		}
		backend := resp.Header.Get("X-Warmroute-Backend")
		if turn == 0 {
			first = backend
		} else if backend != first || answer.Usage.InputTokensDetails.CachedTokens == 0 {
			t.Errorf("turn %d went to %s and found %d tokens, the first one to %s", turn, backend, answer.Usage.InputTokensDetails.CachedTokens,
				first)
		}
		p.Input.OfInputItemList = append(p.Input.OfInputItemList,
			responses.ResponseInputItemParamOfMessage(answer.OutputText(), responses.EasyInputMessageRoleAssistant), userItem(words(10)))
		f.awaitIdle(t)
	}
}

func (f *sdkFleet) responseToolCall(t *testing.T) {
	p := f.response(80, 300)
	p.SetExtraFields(nil)
	p.Temperature = openai.Float(0)
	p.Tools = []responses.ToolUnionParam{{OfFunction: &responses.FunctionToolParam{Name: "weather", Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"city": map[string]any{"type": "string"}}, "required": []string{"city"},
	}}}}
	p.ToolChoice.OfToolChoiceMode = openai.Opt(responses.ToolChoiceOptionsRequired)
	answer, err := f.client.Responses.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if len(answer.Output) == 0 || answer.Output[len(answer.Output)-1].Type != "function_call" {
		t.Fatalf("got %s", answer.RawJSON())
	}
	call := answer.Output[len(answer.Output)-1].AsFunctionCall()
	if call.Name != "weather" || !json.Valid([]byte(call.Arguments)) {
		t.Errorf("got the call %s", call.RawJSON())
	}
	if got, err := f.streamResponse(t, p); err != nil || got.arguments != call.Arguments {
		t.Errorf("the stream has the arguments %q, %v; the whole response %q", got.arguments, err, call.Arguments)
	}

	result := responses.ResponseInputItemParamOfFunctionCallOutput(`{"degrees":21}`)
	result.OfFunctionCallOutput.CallID = openai.String(call.CallID)
	p.Input.OfInputItemList = append(p.Input.OfInputItemList,
		responses.ResponseInputItemParamOfFunctionCall(call.Arguments, call.CallID, call.Name), result)
	p.ToolChoice.OfToolChoiceMode, p.MaxOutputTokens = openai.Opt(responses.ToolChoiceOptionsAuto), openai.Int(8)
	answer, err = f.client.Responses.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if answer.Usage.InputTokensDetails.CachedTokens == 0 {
		t.Error("the turn with the tool's result found nothing in the cache")
	}
}

// expectError fails unless err is the SDK's error with that status.
func expectError(t *testing.T, err error, status int) *openai.Error {
	t.Helper()
	var e *openai.Error
	if !errors.As(err, &e) || e.StatusCode != status || e.Message == "" {
		t.Fatalf("got %v, want the SDK's error with status %d and a message", err, status)
	}
	return e
}

func (f *sdkFleet) unknownModel(t *testing.T) {
	p := f.chat(5, 1)
	p.Model = "nobody"
	_, err := f.client.Chat.Completions.New(t.Context(), p)
	if e := expectError(t, err, http.StatusNotFound); e.Code != "model_not_found" || !strings.Contains(e.Message, f.model) {
		t.Errorf("code %q, message %q", e.Code, e.Message)
	}
	_, err = f.stream(t, p)
	expectError(t, err, http.StatusNotFound)
}

func (f *sdkFleet) promptTooLong(t *testing.T) {
	p := f.chat(20_000, 1)
	_, err := f.client.Chat.Completions.New(t.Context(), p)
	if e := expectError(t, err, http.StatusBadRequest); !strings.Contains(e.Message, "maximum context length") {
		t.Errorf("message %q", e.Message)
	}
	_, err = f.stream(t, p)
	expectError(t, err, http.StatusBadRequest)
}

func (f *sdkFleet) notJSON(t *testing.T) {
	for _, body := range []string{"", "{", `{"model":"` + f.model + `","messages":[`, "\xff\xfe", "[1]"} {
		body := option.WithRequestBody("application/json", []byte(body))
		expectError(t, f.client.Post(t.Context(), "chat/completions", nil, nil, body), http.StatusBadRequest)
	}
}

func (f *sdkFleet) unknownPath(t *testing.T) {
	_, err := f.client.Batches.List(t.Context(), openai.BatchListParams{})
	expectError(t, err, http.StatusNotFound)
}

// unfinished is the length of an answer that nobody can mistake for one that
// ran to its end when it was cut: most of the context window.
const unfinished = 7000

// awaitIdle waits until no request is in flight, also for the proxy: a client may have the end of a response before that has
// recorded it.
func (f *sdkFleet) awaitIdle(t *testing.T) {
	t.Helper()
	f.eventually(t, "all replicas idle", func() bool {
		return running(t, f.replicas...) == 0 && f.proxyMetric(t, "warmroute_backend_in_flight") == 0
	})
}

func (f *sdkFleet) leaveInMidStream(t *testing.T) {
	f.awaitIdle(t)
	before := f.generated(t)
	s := f.client.Chat.Completions.NewStreaming(t.Context(), f.chat(20, unfinished))
	for range 5 {
		if !s.Next() {
			t.Fatal("the stream ended early: ", s.Err())
		}
	}
	s.Close()
	f.checkFreed(t, before)
}

func (f *sdkFleet) leavePlainRequest(t *testing.T) {
	f.awaitIdle(t)
	before := f.generated(t)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := make(chan error, 1)
	go func() {
		_, err := f.client.Chat.Completions.New(ctx, f.chat(20, unfinished))
		left <- err
	}()
	f.eventually(t, "the request runs", func() bool { return running(t, f.replicas...) > 0 })
	leave()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	f.checkFreed(t, before)
}

// checkFreed fails unless the replicas stop computing, and the proxy counting,
// before the answer is complete.
func (f *sdkFleet) checkFreed(t *testing.T, generatedBefore float64) {
	t.Helper()
	f.awaitIdle(t)
	if n := f.generated(t) - generatedBefore; n >= unfinished {
		t.Errorf("%.0f tokens were computed for a client that had left", n)
	}
	f.awaitNoneInFlight(t)
}

func (f *sdkFleet) awaitNoneInFlight(t *testing.T) {
	t.Helper()
	f.eventually(t, "nothing in flight", func() bool { return f.proxyMetric(t, "warmroute_backend_in_flight") == 0 })
}

// What plays while the replica dies: chats at once, of so many turns each.
const (
	killChats = 30
	killTurns = 3
)

// killCounts is what became of the turns.
type killCounts struct {
	answered atomic.Int64
	retried  atomic.Int64 // answers that took more than one attempt
	broken   atomic.Int64 // streams that ended with an error after they had begun
}

func (f *sdkFleet) replicaKilled(t *testing.T) {
	victim := f.replicas[len(f.replicas)-1]
	var counts killCounts
	var playing sync.WaitGroup
	for i := range killChats {
		playing.Go(func() {
			if err := f.playWhileKilled(t, &counts, i%2 == 0); err != nil {
				t.Error(err)
			}
		})
	}
	f.eventually(t, "the victim works and turns are answered", func() bool {
		return counts.answered.Load() > 0 && running(t, victim) > 0
	})
	f.kill()
	playing.Wait()
	f.restart()

	answered, retried, broken := counts.answered.Load(), counts.retried.Load(), counts.broken.Load()
	t.Logf("%d answered, %d of them by another replica, %d streams broken after they began", answered, retried, broken)
	if answered+broken != killChats*killTurns {
		t.Errorf("%d turns of %d are accounted for", answered+broken, killChats*killTurns)
	}
	if retried+broken == 0 {
		t.Error("the victim had nothing to lose: the test showed nothing")
	}
	f.awaitNoneInFlight(t)
	f.eventually(t, "the restarted replica gets traffic again", func() bool { return f.serves(t, victim) })
}

// serves reports whether one of several new conversations, sent at once, is answered by this replica. A single one goes to the
// fastest of the replicas that are idle, which may always be another.
func (f *sdkFleet) serves(t *testing.T, replica string) bool {
	t.Helper()
	var answers sync.WaitGroup
	var found atomic.Bool
	for range 2 * len(f.replicas) {
		answers.Go(func() {
			var resp *http.Response
			if _, err := f.client.Chat.Completions.New(t.Context(), f.chat(80, 1), option.WithResponseInto(&resp)); err != nil {
				t.Error(err)
			} else if strings.HasSuffix(resp.Header.Get("X-Warmroute-Backend"), ":"+port(t, replica)) {
				found.Store(true)
			}
		})
	}
	answers.Wait()
	return found.Load()
}

// playWhileKilled plays one chat. A plain request has to succeed whatever
// happens; a stream may end with an error, but only one that it carries itself,
// after it has begun.
func (f *sdkFleet) playWhileKilled(t *testing.T, counts *killCounts, stream bool) error {
	p := f.chat(100, 100)
	for range killTurns {
		turn := f.plainTurn
		if stream {
			turn = f.streamedTurn
		}
		text, err := turn(t, counts, p)
		if err != nil {
			return err
		}
		p.Messages = append(p.Messages, openai.AssistantMessage(text), openai.UserMessage(words(20)))
	}
	return nil
}

func (f *sdkFleet) plainTurn(t *testing.T, counts *killCounts, p openai.ChatCompletionNewParams) (string, error) {
	var resp *http.Response
	answer, err := f.client.Chat.Completions.New(t.Context(), p, option.WithResponseInto(&resp))
	if err != nil {
		return "", fmt.Errorf("a request that was not committed failed: %w", err)
	}
	counts.add(resp.Header)
	return answer.Choices[0].Message.Content, nil
}

func (f *sdkFleet) streamedTurn(t *testing.T, counts *killCounts, p openai.ChatCompletionNewParams) (string, error) {
	got, err := f.stream(t, p)
	switch {
	case err == nil && got.finish == "length":
		counts.add(got.header)
	case err == nil:
		return "", fmt.Errorf("a stream ended with finish_reason %q and no error", got.finish)
	case got.chunks == 0:
		return "", fmt.Errorf("a stream that was not committed failed: %w", err)
	case !errors.As(err, new(*ssestream.StreamError)):
		return "", fmt.Errorf("a stream was cut, without an error event: %w", err)
	default:
		counts.broken.Add(1)
	}
	return got.text, nil
}

func (c *killCounts) add(header http.Header) {
	c.answered.Add(1)
	if header.Get("X-Warmroute-Attempts") != "1" {
		c.retried.Add(1)
	}
}

// TestSDKSeesAbortedStreamFail holds that an SDK does not take the part of an answer
// for the whole that a replica's engine has aborted.
func TestSDKSeesAbortedStreamFail(t *testing.T) {
	f := &sdkFleet{model: "sim"}
	url, _ := startSimReplica(t, sim.Config{}, "127.0.0.1:0")
	f.replicas = []string{url}
	f.startProxy(t)
	resp, err := http.Post(url+"/sim/fault", "application/json", strings.NewReader(`{"kind":"abort-each","chunks":3,"requests":1}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		t.Fatalf("the fault gets status %d", resp.StatusCode)
	}
	got, err := f.stream(t, f.chat(20, 100))
	var e *ssestream.StreamError
	if !errors.As(err, &e) || !strings.Contains(e.Error(), "replica_aborted") || got.text == "" || got.finish != "" {
		t.Errorf("got %q, finish_reason %q and the error %v", got.text, got.finish, err)
	}
	if n := f.proxyMetric(t, "warmroute_backend_aborted_responses_total"); n != 1 {
		t.Errorf("%v aborted responses were counted", n)
	}
}

// TestSDKSeesBrokenResponseFail holds that the error event of a response's stream is an
// error of the SDK.
func TestSDKSeesBrokenResponseFail(t *testing.T) {
	f := &sdkFleet{model: "sim"}
	url, _ := startSimReplica(t, sim.Config{}, "127.0.0.1:0")
	f.replicas = []string{url}
	f.startProxy(t)
	resp, err := http.Post(url+"/sim/fault", "application/json", strings.NewReader(`{"kind":"die","chunks":3,"requests":1}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		t.Fatalf("the fault gets status %d", resp.StatusCode)
	}
	got, err := f.streamResponse(t, f.response(20, 100))
	var e *ssestream.StreamError
	if !errors.As(err, &e) || !strings.Contains(e.Error(), "replica_failed") || got.text == "" {
		t.Errorf("got %q and the error %v", got.text, err)
	}
}
