package prompt_test

import (
	"fmt"
	"strings"

	"warmroute/prompt"
)

// marks makes the marks between the fields of a chat's canonical prompt readable.
var marks = strings.NewReplacer("\xff", "\n<message> ", "\xfd", " <text> ", "\xfa", " <call> ", "\xf9", " <arguments> ")

func ExamplePrompt_Parse() {
	var p prompt.Prompt
	body := []byte(`{"model": "llama", "stream": true, "max_tokens": 100, "messages": [
		{"role": "system", "content": "Be brief."},
		{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "a prefix?"}]},
		{"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "function": {"name": "look", "arguments": "{\"word\": \"prefix\"}"}}]}]}`)
	if err := p.Parse(prompt.Chat, body); err != nil {
		fmt.Println(err)
		return
	}
	p.ApplyLayout(prompt.DefaultLayout)
	fmt.Println(p.Model, p.Stream, p.MaxTokens)
	// Quotes within JSON are marks, too.
	fmt.Println(strings.ReplaceAll(marks.Replace(string(p.Text)), "\xf7", "'"))
	// Output:
	// llama true 100
	//
	// <message> system <text> Be brief.
	// <message> user <text> What is
	// a prefix?
	// <message> assistant <text>  <call> look <arguments> {'word':'prefix'}
}

// Two turns of a conversation share the blocks of the first, however their bodies are written.
func ExamplePrompt_AppendBlocks() {
	blocks := func(body string) []prompt.Block {
		var p prompt.Prompt
		if err := p.Parse(prompt.Chat, []byte(body)); err != nil {
			fmt.Println(err)
		}
		p.ApplyLayout(prompt.DefaultLayout)
		return p.AppendBlocks(nil, p.Model, 16) // 16 bytes each; the proxy uses 256
	}
	first := blocks(`{"model":"llama","messages":[{"role":"user","content":"Which blocks does a second turn share with the first?"}]}`)
	second := blocks(`{"messages": [
		{"content": "Which blocks does a second turn share with the f\u0069rst?", "role": "user"},
		{"content": "All that are full.", "role": "assistant"},
		{"content": "Why?", "role": "user"}], "model": "llama", "temperature": 0.5}`)
	shared := 0
	for shared < len(first) && first[shared] == second[shared] {
		shared++
	}
	fmt.Printf("%d blocks, then %d, of which %d are shared\n", len(first), len(second), shared)
	// Output:
	// 3 blocks, then 6, of which 3 are shared
}

// The blocks of a response follow those of its prompt, so that the next turn, which sends the
// response back, finds both.
func ExampleResponse() {
	var p prompt.Prompt
	if err := p.Parse(prompt.Chat, []byte(`{"messages":[{"role":"user","content":"Tell me about KV caches, please."}]}`)); err != nil {
		fmt.Println(err)
		return
	}
	p.ApplyLayout(prompt.DefaultLayout)
	blocks := p.AppendBlocks(nil, "llama", 16)

	var start prompt.ResponseStart
	start.SetFrom(&p)
	var r prompt.Response
	r.Reset(&start)
	for _, text := range []string{"They hold keys ", "and values ", "of earlier tokens."} {
		r.AddEvent(fmt.Appendf(nil, `{"choices":[{"index":0,"delta":{"content":%q}}]}`, text))
	}
	blocks = append(blocks, r.Finish()...)
	fmt.Printf("%d blocks, and %d bytes of the response after them\n", len(blocks), r.TailBytes())
	// Output:
	// 5 blocks, and 13 bytes of the response after them
}
