// Package prompt turns the bytes of a request into its canonical prompt: a byte
// string in which two requests share a prefix when the prompts that vLLM
// renders from them do, as far as that can be known without the chat template.
//
// A body is scanned once, checked and read at the same time; it is never
// decoded as a whole. What vLLM refuses for certain is refused here where
// routing has to understand it (see [Error]); the rest passes, and the replica
// says what is wrong with it in its own words.
package prompt

import (
	"bytes"
	"fmt"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// Kind tells how a body is to be read.
type Kind uint8

const (
	Chat       Kind = iota // /v1/chat/completions
	Completion             // /v1/completions
	Other                  // any other JSON body: only its syntax and its head matter
)

// Error says why a body cannot be accepted. It is the client's fault: a 400.
type Error struct {
	Param   string // the top-level key at fault; "" for the body itself
	Message string
}

func (e *Error) Error() string { return e.Message }

// Prompt is what routing needs to know of one request. It is meant to be kept
// in a pool: Parse overwrites it and keeps its buffers. Not safe for concurrent use.
type Prompt struct {
	Model            string // "" when absent, null or empty: the fleet's only base model
	Stream           bool
	PreviousResponse bool // Other only: previous_response_id is there and not null

	MaxTokens int // of the answer, at most; 0 when absent
	Sequences int // sequences the engine will run: n, or best_of when larger, for each prompt; at least 1

	// Cacheable is false when the prefix cache does not serve the request
	// (prompt_logprobs) or the text does not tell the prompt's beginning
	// (truncate_prompt_tokens, prompt_embeds).
	Cacheable bool

	// Opening is the hash of the first openingChars characters of the first user
	// message, or of a completion's text; 0 when there is none.
	Opening uint64

	// Text is the canonical prompt, valid until the next Parse or Reset. It
	// does not alias the body.
	Text []byte
	// ExtraBytes are bytes of prompts that count in the load and not in the
	// match: the second and later prompts of a list, and media past maxMedia.
	// Of Other bodies all counts so, each of their media as mediaBytes.
	ExtraBytes int

	scan    scanner
	top     [numFields]value
	seed    uint64 // what changes the prompt beside the model and Text
	turns   turns
	tools   tools
	opened  bool     // Opening is set
	chain   chainEnd // of the blocks made of it
	form    byte     // of the prompt
	echo    bool     // the answer of a completion begins with its prompt
	prompts int      // in the list of a completion
	media   int      // media parts written into Text
	content []byte   // of the message being read
	scratch []byte   // a string or value being looked at
}

// keepBytes is the longest buffer that Reset leaves for the next request: one
// huge body must not make every pooled Prompt huge.
const keepBytes = 2 << 20

// Reset forgets the last request, and buffers that only a very long one needs.
// Parse does the former itself.
func (p *Prompt) Reset() {
	tools := p.tools
	*p = Prompt{
		// Most often the next request names the same model, and its string
		// need not be made again.
		Model:   p.Model,
		Text:    keep(p.Text),
		content: keep(p.content),
		scratch: keep(p.scratch),
		turns:   turns{reasoning: keep(p.turns.reasoning)},
	}
	if cap(tools.raw) <= keepBytes {
		p.tools = tools
	}
}

func keep[T any](buf []T) []T {
	if cap(buf) > keepBytes {
		return nil
	}
	return buf[:0]
}

// Parse reads body, which it neither changes nor keeps. A refused body gives
// an *Error, and then p holds nothing of use.
func (p *Prompt) Parse(kind Kind, body []byte) error {
	p.Reset()
	p.Sequences, p.Cacheable = 1, true
	if !utf8.Valid(body) {
		return invalidUTF8(body)
	}
	p.scan.b = body
	defer func() { p.scan.b = nil }()
	if err := p.members(kind); err != nil {
		return err
	}
	if err := p.head(); err != nil {
		return err
	}
	switch kind {
	case Chat:
		return p.chat()
	case Completion:
		return p.completion()
	}
	p.ExtraBytes = len(body) - p.scan.media
	return nil
}

// HasMedia says whether part of Text stands for an image, a sound or a video.
func (p *Prompt) HasMedia() bool { return p.media > 0 }

func invalidUTF8(body []byte) error {
	at := 0
	for {
		r, n := utf8.DecodeRune(body[at:])
		if r == utf8.RuneError && n == 1 {
			return &Error{Message: fmt.Sprintf("the request body is not valid UTF-8: byte %d is 0x%02x", at, body[at])}
		}
		at += n
	}
}

// members checks the whole body and notes where its top-level values lie. The
// messages, most of a long body, are read as they are met.
func (p *Prompt) members(kind Kind) error {
	s := &p.scan
	// vLLM accepts a byte order mark.
	i := s.space(len(s.b) - len(bytes.TrimPrefix(s.b, []byte("\xef\xbb\xbf"))))
	if i == len(s.b) {
		return &Error{Message: "the request body is empty: a JSON object was expected"}
	}
	if s.b[i] != '{' {
		if _, err := s.value(i, 0); err != nil {
			return err
		}
		return &Error{Message: "the request body must be a JSON object"}
	}
	i++
	for {
		key, at, ok, err := s.member(i)
		if err != nil {
			return err
		}
		if !ok {
			i = at
			break
		}
		f := fieldOf(kind, p.text(key))
		if f != fieldNone && p.top[f].given() {
			// vLLM would take the last one, and another reader the first.
			name := string(p.text(key))
			return &Error{Param: name, Message: fmt.Sprintf("%q is given twice", name)}
		}
		switch {
		case f == fieldMessages:
			i, err = p.readMessages(at)
		case f == fieldPrompt:
			i, err = p.readPrompt(at)
		case f == fieldTools:
			i, err = p.readTools(at)
		default:
			p.top[f], err = s.value(at, 1)
			i = p.top[f].end
		}
		if err != nil {
			return err
		}
		p.top[f].start, p.top[f].end = at, i
	}
	p.top[fieldNone] = value{}
	if i = s.space(i); i < len(s.b) {
		return s.fail(i, "the end")
	}
	return nil
}

// head reads what all kinds of bodies share.
func (p *Prompt) head() error {
	s, top := &p.scan, &p.top
	switch model := top[fieldModel]; {
	case !s.set(model):
		p.Model = ""
	case s.first(model) != '"':
		return &Error{Param: "model", Message: "model must be a string"}
	default:
		if name := p.text(model); p.Model != string(name) {
			p.Model = string(name)
		}
	}
	p.Stream = p.truthy(top[fieldStream])
	p.PreviousResponse = s.set(top[fieldPreviousResponse])
	p.MaxTokens = p.integer(top[fieldMaxCompletionTokens])
	if p.MaxTokens == 0 {
		p.MaxTokens = p.integer(top[fieldMaxTokens])
	}
	p.Sequences = max(1, p.integer(top[fieldN]), p.integer(top[fieldBestOf]))
	p.echo = p.truthy(top[fieldEcho])
	// Of a completion with echo, logprobs are prompt_logprobs.
	p.Cacheable = !s.set(top[fieldPromptLogprobs]) && !s.set(top[fieldTruncate]) && !s.set(top[fieldPromptEmbeds]) &&
		!(p.echo && s.set(top[fieldLogprobs]))
	return nil
}

// openingChars is how much of a text tells one conversation's beginning from
// another's.
const openingChars = 100

// open notes the beginning of the first text of a user.
func (p *Prompt) open(text []byte) {
	if p.opened {
		return
	}
	p.opened = true
	end := 0
	for n := 0; n < openingChars && end < len(text); n++ {
		_, size := utf8.DecodeRune(text[end:])
		end += size
	}
	p.Opening = xxh3.Hash(text[:end])
}

// seedWith makes the seed from the settings that change a prompt as a whole.
// Lists of token ids, texts and chats get seeds of their own.
func (p *Prompt) seedWith(form byte) {
	buf := append(p.scratch[:0], form)
	for f := firstSeed; f < numFields; f++ {
		v := p.top[f]
		if !p.scan.set(v) || f == fieldToolChoice && string(p.scan.b[v.start:v.end]) != `"none"` {
			continue
		}
		buf = append(buf, markField, byte(f))
		buf = p.scan.appendMinified(buf, v)
	}
	p.seed = xxh3.Hash(buf)
	p.scratch = buf
}
