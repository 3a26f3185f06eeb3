package e2e

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

// chat is a new conversation whose system prompt has so many words, to be
// answered with exactly so many tokens.
func (f *sdkFleet) chat(promptWords int, answerTokens int64) openai.ChatCompletionNewParams {
	p := openai.ChatCompletionNewParams{
		Model:     f.model,
		MaxTokens: openai.Int(answerTokens),
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
		backend, match := got.header.Get("X-Warmroute-Backend"), got.header.Get("X-Warmroute-Prefix-Match")
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
	answer, err := f.client.Completions.New(t.Context(), openai.CompletionNewParams{
		Model:     openai.CompletionNewParamsModel(f.model),
		Prompt:    openai.CompletionNewParamsPromptUnion{OfString: openai.String(words(20))},
		MaxTokens: openai.Int(12),
	})
	if err != nil {
		t.Fatal(err)
	}
	if answer.Choices[0].Text == "" {
		t.Errorf("got %s", answer.RawJSON())
	}
}

func (f *sdkFleet) responses(t *testing.T) {
	p := responses.ResponseNewParams{
		Model:           f.model,
		Input:           responses.ResponseNewParamsInputUnion{OfString: openai.String(words(20))},
		MaxOutputTokens: openai.Int(16),
	}
	answer, err := f.client.Responses.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if answer.OutputText() == "" {
		t.Errorf("got %s", answer.RawJSON())
	}
	s := f.client.Responses.NewStreaming(t.Context(), p)
	defer s.Close()
	var last string
	for s.Next() {
		last = s.Current().Type
	}
	if s.Err() != nil || (last != "response.completed" && last != "response.incomplete") {
		t.Errorf("the stream ended with %q, %v", last, s.Err())
	}
}
