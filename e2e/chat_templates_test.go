//go:build vllm

package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"

	"warmroute/prompt"
)

const (
	// conversationsPerTemplate is for each API; four templates make 104.
	conversationsPerTemplate = 26
	// firstConversations have what layouts differ in, inline system messages or reasoning. They are
	// not counted: the proxy learns the layout from them.
	firstConversations = 6
	replicaBlockTokens = 32
	indexBlockBytes    = 256
	maxOutputTokens    = 12
)

// conversationAPI is how an API writes a conversation, and where its responses have what the test
// needs.
type conversationAPI struct {
	kind              prompt.Kind
	path              string
	text              string // path of the text of a response
	total, cached     string // paths of the number of the prompt's tokens, and of those cached
	developerMessages bool   // inline system messages may have the role developer
	body              func(*conversation) map[string]any
}

var conversationAPIs = []conversationAPI{
	{prompt.Chat, "/v1/chat/completions", "choices.0.message.content", "usage.prompt_tokens", "usage.prompt_tokens_details.cached_tokens",
		true, chatBody},
	{prompt.Messages, "/v1/messages", `content.#(type=="text").text`, "usage.input_tokens", "usage.cache_read_input_tokens", false,
		messagesBody},
	{prompt.Responses, "/v1/responses", `output.#(type=="message").content.0.text`, "usage.input_tokens",
		"usage.input_tokens_details.cached_tokens", true, responsesBody},
}

// conversation is a conversation that each API can express.
type conversation struct {
	system string
	tools  []toolDefinition
	steps  []step
	limit  int // tokens of a response
}

type toolDefinition struct{ name, description, property string }

// step is a message: of the user, of the system, or of the assistant with the results of its calls.
type step struct {
	role      string // user, system, developer or assistant
	texts     []string
	reasoning string
	calls     []toolCall
}

type toolCall struct{ id, name, argument, result string }

func (c *toolCall) arguments() map[string]any {
	return map[string]any{"value": c.argument, "lines": 20}
}

func textParts(kind string, texts []string) any {
	if len(texts) == 1 {
		return texts[0]
	}
	var parts []any
	for _, text := range texts {
		parts = append(parts, map[string]any{"type": kind, "text": text})
	}
	return parts
}

func (t *toolDefinition) schema() map[string]any {
	return map[string]any{"type": "object", "required": []string{"value"}, "properties": map[string]any{
		"value": map[string]any{"type": "string", "description": t.property}, "lines": map[string]any{"type": "integer"}}}
}

func chatBody(c *conversation) map[string]any {
	messages := []any{map[string]any{"role": "system", "content": c.system}}
	for _, s := range c.steps {
		m := map[string]any{"role": s.role, "content": textParts("text", s.texts)}
		if s.reasoning != "" {
			m["reasoning"] = s.reasoning
		}
		messages = append(messages, m)
		var calls []any
		for _, call := range s.calls {
			arguments, _ := json.Marshal(call.arguments())
			calls = append(calls, map[string]any{"id": call.id, "type": "function", "function": map[string]any{"name": call.name,
				"arguments": string(arguments)}})
			messages = append(messages, map[string]any{"role": "tool", "tool_call_id": call.id, "content": call.result})
		}
		if calls != nil {
			m["tool_calls"] = calls
		}
	}
	body := map[string]any{"model": "tiny", "messages": messages, "max_tokens": c.limit, "temperature": 0}
	if c.tools != nil {
		var tools []any
		for _, t := range c.tools {
			tools = append(tools, map[string]any{"type": "function", "function": map[string]any{"name": t.name, "description": t.description,
				"parameters": t.schema()}})
		}
		body["tools"] = tools
	}
	return body
}

func messagesBody(c *conversation) map[string]any {
	var messages, results []any
	for _, s := range c.steps {
		switch s.role {
		case "user":
			content := textParts("text", s.texts)
			if results != nil {
				for _, text := range s.texts {
					results = append(results, map[string]any{"type": "text", "text": text})
				}
				content, results = results, nil
			}
			messages = append(messages, map[string]any{"role": "user", "content": content})
		case "assistant":
			if results != nil {
				messages, results = append(messages, map[string]any{"role": "user", "content": results}), nil
			}
			var blocks []any
			if s.reasoning != "" {
				blocks = append(blocks, map[string]any{"type": "thinking", "thinking": s.reasoning, "signature": "s"})
			}
			for _, text := range s.texts {
				blocks = append(blocks, map[string]any{"type": "text", "text": text})
			}
			for _, call := range s.calls {
				blocks = append(blocks, map[string]any{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments()})
				results = append(results, map[string]any{"type": "tool_result", "tool_use_id": call.id, "content": call.result})
			}
			messages = append(messages, map[string]any{"role": "assistant", "content": blocks})
		default:
			if results != nil {
				messages, results = append(messages, map[string]any{"role": "user", "content": results}), nil
			}
			messages = append(messages, map[string]any{"role": s.role, "content": textParts("text", s.texts)})
		}
	}
	if results != nil {
		messages = append(messages, map[string]any{"role": "user", "content": results})
	}
	system := []any{map[string]any{"type": "text", "text": fmt.Sprint("x-anthropic-billing-header: cc_version=2; cch=", len(messages))},
		map[string]any{"type": "text", "text": c.system, "cache_control": map[string]any{"type": "ephemeral"}}}
	body := map[string]any{"model": "tiny", "system": system, "messages": messages, "max_tokens": c.limit, "temperature": 0}
	if c.tools != nil {
		var tools []any
		for _, t := range c.tools {
			tools = append(tools, map[string]any{"name": t.name, "description": t.description, "input_schema": t.schema()})
		}
		body["tools"] = tools
	}
	return body
}

func responsesBody(c *conversation) map[string]any {
	var items []any
	for _, s := range c.steps {
		if s.role != "assistant" {
			items = append(items, map[string]any{"type": "message", "role": s.role, "content": textParts("input_text", s.texts)})
			continue
		}
		if s.reasoning != "" {
			items = append(items, map[string]any{"type": "reasoning", "id": "rs_1", "summary": []any{},
				"content": []any{map[string]any{"type": "reasoning_text", "text": s.reasoning}}})
		}
		for _, text := range s.texts {
			items = append(items, map[string]any{"type": "message", "role": "assistant",
				"content": []any{map[string]any{"type": "output_text", "text": text}}})
		}
		for _, call := range s.calls {
			arguments, _ := json.Marshal(call.arguments())
			items = append(items, map[string]any{"type": "function_call", "call_id": call.id, "name": call.name, "arguments": string(arguments)})
		}
		for _, call := range s.calls {
			items = append(items, map[string]any{"type": "function_call_output", "call_id": call.id, "output": call.result})
		}
	}
	body := map[string]any{"model": "tiny", "instructions": c.system, "input": items, "max_output_tokens": c.limit, "temperature": 0}
	if c.tools != nil {
		var tools []any
		for _, t := range c.tools {
			tools = append(tools, map[string]any{"type": "function", "name": t.name, "description": t.description, "parameters": t.schema()})
		}
		body["tools"] = tools
	}
	return body
}

// conversationText is a text of about so many bytes. Its tokens are as long as those of the
// tools, three bytes, so that a share of the bytes is a share of the tokens.
func conversationText(r *rand.Rand, size int) string {
	words := strings.Fields("replica holds waits goes low tokens score router layout reads the of a is in to and for it")
	var b strings.Builder
	for fmt.Fprintf(&b, "%d", r.IntN(1000)); b.Len() < size; {
		b.WriteString(" " + words[r.IntN(len(words))])
		if r.IntN(12) == 0 {
			b.WriteString(".\n")
		}
	}
	return b.String()
}

func drawCalls(r *rand.Rand, tools []toolDefinition) (calls []toolCall) {
	for n := range 1 + r.IntN(2) {
		calls = append(calls, toolCall{fmt.Sprint("call_", r.IntN(1e6), n), tools[r.IntN(len(tools))].name, conversationText(r, 40),
			conversationText(r, 100+r.IntN(500))})
	}
	return calls
}

// templateTest plays conversations against one replica with one template.
type templateTest struct {
	api    *conversationAPI
	proxy  string
	layout prompt.Layout // that the template has
	worst  float64       // of the conversation that is played: tokens between match and hit, in blocks
	where  string
}

// ask sends the conversation as it stands, compares what was matched with what was cached, and
// returns the text of the response.
func (tt *templateTest) ask(t *testing.T, c *conversation) (text string) {
	t.Helper()
	body, err := json.Marshal(tt.api.body(c))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post(tt.proxy+tt.api.path, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d, %v: %s", resp.StatusCode, err, got)
	}
	var matched, all float64
	if _, err := fmt.Sscanf(resp.Header.Get("X-Warmroute-Predicted-Tokens"), "%f/%f", &matched, &all); err != nil {
		t.Fatalf("header X-Warmroute-Predicted-Tokens %q: %v", resp.Header.Get("X-Warmroute-Predicted-Tokens"), err)
	}
	cached := gjson.GetBytes(got, tt.api.cached).Float()
	tokens := gjson.GetBytes(got, tt.api.total).Float()
	if tt.api.kind == prompt.Messages { // which counts them apart
		tokens += cached + gjson.GetBytes(got, "usage.cache_creation_input_tokens").Float()
	}
	var p prompt.Prompt
	if err := p.Parse(tt.api.kind, body); err != nil {
		t.Fatal(err)
	}
	p.ApplyLayout(tt.layout)
	// What the proxy takes for a token differs from the replica's; the shares do not. Both sides
	// are whole blocks, of different sizes.
	block := max(replicaBlockTokens, indexBlockBytes*tokens/float64(len(p.Text)))
	if off := math.Abs(math.Round(matched/all*tokens/block) - math.Floor(cached/block)); off > tt.worst {
		tt.worst = off
		tt.where = fmt.Sprintf("message %d: %.0f of %.0f tokens expected, %.0f cached", len(c.steps), matched/all*tokens, tokens, cached)
	}
	return gjson.GetBytes(got, tt.api.text).Str
}

// play plays a drawn conversation of several turns, with tool calls, reasoning and, if the replica
// accepts them, system messages between the others.
func (tt *templateTest) play(t *testing.T, seed, templateSeed uint64, first bool) {
	r := rand.New(rand.NewPCG(seed, templateSeed))
	tt.worst, tt.where = 0, ""
	c := &conversation{system: conversationText(r, 400+r.IntN(1200)), limit: 1 + r.IntN(maxOutputTokens)}
	tools, turns, hasInline, thinks := r.IntN(4), 3+r.IntN(2), r.IntN(2) == 0, r.IntN(2) == 0
	if first {
		tools, turns, hasInline, thinks = 3, 5, seed%2 == 0, seed%2 == 1
	}
	for n := range tools {
		c.tools = append(c.tools, toolDefinition{fmt.Sprint("tool_", n), conversationText(r, 300), conversationText(r, 80)})
	}
	inline := ""
	switch {
	case !hasInline:
	case tt.api.developerMessages && (first || tt.layout&prompt.SystemInPlace == 0 || r.IntN(2) == 0):
		inline = "developer"
	default:
		inline = "system"
	}
	think := func() string {
		if !thinks {
			return ""
		}
		return conversationText(r, 100+r.IntN(400))
	}
	for range turns {
		if inline != "" && len(c.steps) > 0 && (first || r.IntN(3) > 0) {
			c.steps = append(c.steps, step{role: inline, texts: []string{conversationText(r, 100+r.IntN(300))}})
		}
		user := step{role: "user", texts: []string{conversationText(r, 50+r.IntN(500))}}
		if r.IntN(3) == 0 {
			user.texts = append(user.texts, conversationText(r, 200))
		}
		c.steps = append(c.steps, user)
		text := tt.ask(t, c)
		for range r.IntN(3) {
			if c.tools == nil {
				break
			}
			c.steps = append(c.steps, step{role: "assistant", texts: []string{conversationText(r, 60)}, reasoning: think(),
				calls: drawCalls(r, c.tools)})
			text = tt.ask(t, c)
		}
		if thinks || text == "" {
			c.steps = append(c.steps, step{role: "assistant", texts: []string{conversationText(r, 50+r.IntN(300))}, reasoning: think()})
		} else {
			c.steps = append(c.steps, step{role: "assistant", texts: []string{text}})
		}
	}
}

// TestMatchIsCachedWithEachTemplate plays drawn conversations over each API against real replicas
// with four chat templates. What the proxy expects in the replica's cache has to be there, within
// a block, in the worst request of 99 conversations of 100.
func TestMatchIsCachedWithEachTemplate(t *testing.T) {
	t.Parallel()
	slots := make(chan struct{}, 2) // replicas at a time, of 1 to 2 GB each
	var mu sync.Mutex
	played, off := map[string]int{}, map[string]int{}
	t.Run("templates", func(t *testing.T) { // ends when all parallel tests in it have ended
		for n, template := range []struct {
			name   string
			layout prompt.Layout
		}{
			{"system-first", prompt.ToolsFirst | prompt.KeepReasoning},
			{"inline-system", prompt.SystemInPlace | prompt.KeepReasoning},
			{"drop-reasoning", prompt.SystemInPlace},
			{"harmony", prompt.SystemInPlace | prompt.DeveloperInPlace},
		} {
			t.Run(template.name, func(t *testing.T) {
				t.Parallel()
				slots <- struct{}{}
				defer func() { <-slots }()
				port, events := fmt.Sprint(18401+n), fmt.Sprint(19401+n)
				dir, err := os.Getwd()
				if err != nil {
					t.Fatal(err)
				}
				vllmCPU(t, "up.sh", port, events, "--chat-template", dir+"/e2e/testdata/templates/"+template.name+".jinja")
				defer vllmCPU(t, "down.sh", "--kill", port)
				proxy := startProgram(t, "http://127.0.0.1:"+port, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
				for i := range conversationAPIs {
					api := &conversationAPIs[i]
					tt := &templateTest{api: api, proxy: proxy.url, layout: template.layout}
					for seed := range firstConversations + conversationsPerTemplate {
						tt.play(t, uint64(100*i+seed), uint64(n), seed < firstConversations)
						if seed < firstConversations {
							continue
						}
						mu.Lock()
						played[api.path]++
						if tt.worst > 1 {
							off[api.path]++
							t.Logf("%s, conversation %d: %.0f blocks off: %s", api.path, seed, tt.worst, tt.where)
						}
						mu.Unlock()
					}
				}
			})
		}
	})
	for path, n := range played {
		t.Logf("%s: %d of %d conversations within a block", path, n-off[path], n)
		if n < 100 || 100*off[path] > n {
			t.Errorf("%s: %d of %d conversations are off by more than a block", path, off[path], n)
		}
	}
}
