// Package prompt finds out which requests share a beginning of their prompts. It turns the
// body of a request into its canonical prompt, a byte string in which two requests share a
// prefix when the prompts that vLLM renders from them do, as far as that is known without
// the chat template, and the canonical prompt into blocks.
//
// A body is checked and read in one pass and never decoded as a whole. It is rejected only where
// routing has to understand it (see [Error]); the rest is left for the replica to reject.
//
// The scanner of JSON is not gjson. A chat of 1 KB takes 4 µs of CPU time, and one of 32 KB 22 µs; with gjson
// it takes 15 and 246 µs to check the syntax and copy the texts alone, where a whole request of 1 KB takes about
// 100 µs (Go 1.26.8, gjson 1.20, "go test -bench Prompt/chat ./prompt"). gjson's check names no byte, and it
// recurses: 16 MiB of opening brackets end the process.
package prompt

import (
	"bytes"
	"cmp"
	"fmt"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// Kind selects how a body is parsed.
type Kind uint8

const (
	Chat       Kind = iota // /v1/chat/completions
	Completion             // /v1/completions
	Messages               // /v1/messages
	Responses              // /v1/responses
	Generate               // /inference/v1/generate
	Other                  // any other JSON body: only its syntax and common fields

	numKinds = iota
)

// Error is why a body is rejected, with status 400.
type Error struct {
	Param   string // the top-level key in error; "" for the body itself
	Message string
}

func (e *Error) Error() string { return e.Message }

// Prompt is what routing needs to know about one request. It is meant to be pooled:
// Parse overwrites it and reuses its buffers. It is not safe for concurrent use.
type Prompt struct {
	Model  string // "" if absent, null or empty
	Stream bool

	// Of Responses only.
	PreviousResponse   string // id of the stored response that it continues; "": none
	PreviousResponseAt int    // index of that string in the body, after its quote; 0: there is none
	ResponseID         string // id that the client gives the response, its request_id; "": none
	ResponseIDAt       int    // index of that string in the body, after its quote; 0: there is none
	NoStore            bool   // the response is not to be stored

	MaxTokens int // of the output; 0: not given
	Sequences int // that the engine will run: the larger of n and best_of for each prompt, at least 1

	// Cacheable is false if the engine does not use its prefix cache (prompt_logprobs)
	// or Text is not the beginning of the prompt (truncate_prompt_tokens,
	// prompt_embeds, previous_response_id).
	Cacheable bool

	// Truncates is true if the engine truncates a prompt that is too long (truncate_prompt_tokens, truncation of Responses).
	Truncates bool

	// FirstMessageHash is the hash of the first maxHashedChars characters of the first
	// user message, or of a completion's text; 0 if there is none.
	FirstMessageHash uint64

	// Conversation is the hash of the name of the conversation that the request belongs to, as
	// prompt_cache_key, session_id or Claude Code's metadata.user_id give it, and
	// ConversationField is which of them did; 0 and "": none.
	Conversation      uint64
	ConversationField string

	// TransferParams is one of TransferParamNames that has a value anywhere in the body, but where
	// hasArbitraryKeys; "": none has.
	TransferParams string

	// Text is the canonical prompt after ApplyLayout, valid until the next Parse or Reset.
	Text []byte
	// ExtraBytes counts bytes of prompts that add load but are not matched: the second
	// and later prompts of a list, media beyond maxMedia, and all of an Other body,
	// each of its media as MediaBytes.
	ExtraBytes int

	kind         Kind
	scan         scanner
	top          [numFields]value
	seed         uint64 // hash of what changes the prompt beside the model and Text
	turns        turns
	tools        tools
	hasTools     bool // tools are those of this prompt
	layout       Layout
	firstHashed  bool     // FirstMessageHash is set
	chain        chainEnd // of the blocks
	format       byte     // of the prompt
	reasoningOff bool     // reasoning_effort is "none", whatever the body says
	echo         bool     // the output of a completion begins with its prompt
	prompts      int      // in the list of a completion
	media        int      // items written into Text

	thinkingBudget bool // of Messages: the tokens of the reasoning are limited
	split          split
	buffers
}

// buffers are reused by the next Parse.
type buffers struct {
	content   []byte  // of the message being read
	system    []byte  // system message that stands outside the messages
	reasoning []byte  // of the message being read, if it is in content blocks
	calls     []value // tool calls of the message being read, if they are content blocks

	toolChanges []byte // blocks that add or remove tools
	merged      []byte // system messages that the layout adds to the first
	forks       []Fork
}

// maxPooledBytes bounds the buffers that Reset keeps for the next request.
const maxPooledBytes = 2 << 20

// Reset forgets the last request, and large buffers. Parse calls it.
func (p *Prompt) Reset() {
	model, text, tools, scratch := p.Model, p.Text, p.tools, p.scan.scratch
	kept, movable, edits := p.buffers, p.turns.movable, p.split.edits
	*p = Prompt{}
	p.Model = model // the next request often names the same one
	p.Text, p.scan.scratch = reuseUnlessLarge(text), reuseUnlessLarge(scratch)
	p.content, p.system = reuseUnlessLarge(kept.content), reuseUnlessLarge(kept.system)
	p.reasoning, p.calls = reuseUnlessLarge(kept.reasoning), reuseUnlessLarge(kept.calls)
	p.toolChanges, p.merged, p.forks = reuseUnlessLarge(kept.toolChanges), reuseUnlessLarge(kept.merged), kept.forks[:0]
	p.turns.movable, p.split.edits = reuseUnlessLarge(movable), edits[:0]
	if cap(tools.raw) <= maxPooledBytes {
		p.tools = tools
	}
}

// reuseUnlessLarge returns buf emptied, or nil if it holds more than maxPooledBytes.
func reuseUnlessLarge[T any](buf []T) []T {
	if cap(buf) > maxPooledBytes {
		return nil
	}
	return buf[:0]
}

// Parse reads a body, which it neither changes nor retains. For a body that is
// rejected it returns an *Error, and p is invalid. [Prompt.ApplyLayout] has to follow.
func (p *Prompt) Parse(kind Kind, body []byte) error {
	p.Reset()
	p.kind, p.Sequences, p.Cacheable = kind, 1, true
	if !utf8.Valid(body) {
		return newInvalidUTF8Error(body)
	}
	p.scan.reset(body)
	defer func() { p.scan.b = nil }()
	p.parseMembers()
	if p.scan.err == nil {
		p.parseCommonFields()
	}
	if p.scan.err == nil {
		p.finish()
	}
	return p.scan.err
}

// finish completes the prompt after the members were read, in any order.
func (p *Prompt) finish() {
	s := &p.scan
	p.hasTools = s.firstByte(p.top[fieldTools]) == '['
	switch p.kind {
	case Chat:
		p.requireField("messages", p.top[fieldMessages].exists())
		p.setSeedFromFields(formatChat)
	case Completion:
		p.requireField("prompt", s.notNull(p.top[fieldPrompt]) || s.notNull(p.top[fieldPromptEmbeds]))
		p.Sequences *= max(1, p.prompts)
		p.finishText()
	case Messages:
		p.requireField("messages", p.top[fieldMessages].exists())
		p.finishMessages()
	case Responses:
		p.requireField("input", p.top[fieldInput].exists())
		p.finishResponses()
	case Generate:
		p.requireField("token_ids", s.notNull(p.top[fieldPrompt]))
		p.parseGenerateFields()
		p.finishText()
	case Other:
		p.ExtraBytes = len(s.b) - s.media
	}
}

// requireField fails if a top-level value is missing.
func (p *Prompt) requireField(name string, exists bool) {
	if !exists {
		p.scan.fail(name, name+" is missing")
	}
}

// TurnKind is the place of a prompt in its conversation.
type TurnKind int8

const (
	TurnUnknown TurnKind = iota // the prompt is not a conversation
	TurnFirst                   // it has no message of the assistant
	TurnLater
)

// TurnKind returns the place of the prompt in its conversation.
func (p *Prompt) TurnKind() TurnKind {
	switch {
	case p.kind != Chat && p.kind != Messages && p.kind != Responses:
		return TurnUnknown
	case p.turns.hasAssistant || p.PreviousResponse != "":
		return TurnLater
	}
	return TurnFirst
}

// newInvalidUTF8Error returns the error for body, which names its first invalid byte.
func newInvalidUTF8Error(body []byte) error {
	at := 0
	for {
		r, n := utf8.DecodeRune(body[at:])
		if r == utf8.RuneError && n == 1 {
			return &Error{Message: fmt.Sprintf("the request body is not valid UTF-8: byte %d is 0x%02x", at, body[at])}
		}
		at += n
	}
}

// TransferParamNames are the parameters of transfers between replicas. vLLM reads them at the top
// level, in vllm_xargs and in sampling_params.extra_args.
var TransferParamNames = [...]string{"kv_transfer_params", "ec_transfer_params"}

// hasArbitraryKeys reports whether the objects in the value of a top-level key are a conversation, tools
// or a schema, metadata or what templates insert: they may have any keys, none of which is a parameter of the engine.
func hasArbitraryKeys(key []byte) bool {
	switch string(key) {
	case "messages", "input", "previous_input_messages", "tools", "functions", "response_format", "structured_outputs", "guided_json",
		"text", "output_config", "metadata", "client_metadata", "documents", "chat_template_kwargs":
		return true
	}
	return false
}

// parseMembers checks the whole body and notes where its top-level values are. It
// reads messages, prompt, input and tools on the way.
func (p *Prompt) parseMembers() {
	s := &p.scan
	// vLLM accepts a byte order mark.
	s.at = s.skipSpace(len(s.b) - len(bytes.TrimPrefix(s.b, []byte("\xef\xbb\xbf"))))
	if s.at == len(s.b) {
		s.fail("", "the request body is empty: a JSON object was expected")
	}
	if !s.enter('{') {
		s.readValue()
		s.fail("", "the request body must be a JSON object")
	}
	p.split.membersAt = s.at
	for s.noteTransferParams = true; s.nextMember(); s.noteTransferParams = true {
		key := s.unquote(s.key)
		f, use := fieldOf(p.kind, key), memberUseOf(key)
		if f != fieldNone && p.top[f].exists() {
			// vLLM takes the last one, other parsers the first.
			s.fail(string(key), fmt.Sprintf("%q is given twice", key))
		}
		s.noteTransferParams = !hasArbitraryKeys(key)
		v := value{start: s.at}
		switch f {
		case fieldMessages:
			p.parseMessages()
		case fieldPrompt:
			p.parsePrompt()
		case fieldInput:
			p.parseInput()
		case fieldTools:
			p.parseTools()
		default:
			v = s.readValue()
		}
		v.end = s.at
		p.top[f] = v
		p.noteMember(f, use, v)
	}
	s.noteTransferParams, p.TransferParams = false, s.transferParams
	p.top[fieldNone] = value{}
	if i := s.skipSpace(s.at); i < len(s.b) {
		s.failSyntax(i, "the end")
	}
}

// parseCommonFields reads the fields that all kinds of bodies share.
func (p *Prompt) parseCommonFields() {
	s, top := &p.scan, &p.top
	if model := top[fieldModel]; !s.notNull(model) {
		p.Model = ""
	} else if name := s.unquote(model); s.firstByte(model) != '"' {
		s.fail("model", "model must be a string")
	} else if p.Model != string(name) {
		p.Model = string(name)
	}
	p.Stream = s.parseBool(top[fieldStream])
	p.MaxTokens = cmp.Or(s.parseInt(top[fieldMaxCompletionTokens]), s.parseInt(top[fieldMaxTokens]))
	p.setConversation()
	p.Sequences = max(1, s.parseInt(top[fieldN]), s.parseInt(top[fieldBestOf]))
	p.echo = s.parseBool(top[fieldEcho])
	// With echo, a completion's logprobs are prompt_logprobs.
	truncation := top[fieldTruncation]
	p.Truncates = s.notNull(top[fieldTruncate]) || s.notNull(truncation) && string(s.unquote(truncation)) != "disabled"
	p.Cacheable = !s.notNull(top[fieldPromptLogprobs]) && !s.notNull(top[fieldTruncate]) && !s.notNull(top[fieldPromptEmbeds]) &&
		!(p.echo && s.notNull(top[fieldLogprobs]))
}

const maxHashedChars = 100

// setFirstMessageHash sets FirstMessageHash from text, unless it is set.
func (p *Prompt) setFirstMessageHash(text []byte) {
	if p.firstHashed {
		return
	}
	p.firstHashed = true
	end := 0
	for n := 0; n < maxHashedChars && end < len(text); n++ {
		size := 1
		if text[end] >= utf8.RuneSelf { // else it need not be decoded
			_, size = utf8.DecodeRune(text[end:])
		}
		end += size
	}
	p.FirstMessageHash = xxh3.Hash(text[:end])
}

// setSeedFromFields sets the format, and the seed to the hash of it and of the fields that change
// a prompt as a whole.
func (p *Prompt) setSeedFromFields(form byte) {
	p.format = form
	buf := append(p.scan.scratch[:0], form)
	for f := firstSeed; f < numFields; f++ {
		v := p.top[f]
		if f == fieldReasoningEffort && p.reasoningOff {
			buf = append(append(buf, markField, byte(f), markQuote), "none"...)
			buf = append(buf, markQuote)
			continue
		}
		if !p.scan.notNull(v) || f == fieldToolChoice && string(p.scan.b[v.start:v.end]) != `"none"` {
			continue
		}
		if f == fieldAddSpecialTokens && form == formatIDs { // vLLM adds none to token ids
			continue
		}
		buf = append(buf, markField, byte(f))
		buf = p.scan.appendMinified(buf, v)
	}
	p.seed = xxh3.Hash(buf)
	p.scan.scratch = buf
}

// Block is the chained hash of a span of the canonical prompt: it stands for the span
// and everything before it.
type Block uint64

// AppendBlocks appends the blocks of the canonical prompt to dst, blockBytes each. The
// chain starts from engineModel, the model as the engine knows it, and from what else
// changes a prompt without being in its text. An incomplete last block is left out,
// as in vLLM's cache. A prompt that is not Cacheable has no blocks.
func (p *Prompt) AppendBlocks(dst []Block, engineModel string, blockBytes int) []Block {
	if !p.Cacheable {
		return dst
	}
	hash := xxh3.HashStringSeed(engineModel, p.seed)
	text := p.Text
	for ; len(text) >= blockBytes; text = text[blockBytes:] {
		hash = xxh3.HashSeed(text[:blockBytes], hash)
		dst = append(dst, Block(hash))
	}
	p.chain = chainEnd{hash, blockBytes, len(text)}
	return dst
}

// chainEnd is the end of the blocks of a text.
type chainEnd struct {
	hash       uint64 // of the last block, or the seed of the first
	blockBytes int
	rest       int // bytes of text after it
}
