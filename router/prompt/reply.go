package prompt

import (
	"slices"

	"github.com/zeebo/xxh3"
)

const (
	// mostReplyBlocks bounds what is remembered of one answer: about 65,000
	// tokens in blocks of the default size, and 8 KiB.
	mostReplyBlocks = 1024
	// keepReplyBytes is the longest buffer that a Reply keeps for the next answer.
	keepReplyBytes = 16 << 10
)

// Reply makes the blocks that follow a prompt's when the next turn sends the
// answer back. It takes the answer as it passes, an event at a time, and keeps
// no more of it than one block's bytes.
//
// Only what the next turn will hold for certain becomes blocks: an answer with
// reasoning, which templates drop, has none. Tool calls are kept until they are
// whole. It is meant to be kept in a pool. Not safe for concurrent use.
type Reply struct {
	scan   scanner
	format replyFormat
	hash   uint64 // of the last block
	size   int    // of a block, in bytes
	text   []byte // canonical text behind the last block
	blocks []Block
	call   call
	key    []byte // one whose escapes had to be undone
	usage  []byte // the first one, part of what is read; nil: none was seen
	alike  alike
	trace  trace // of what is read
}

// replyFormat is how an answer carries its text.
type replyFormat uint8

const (
	replyNone       replyFormat = iota // it has none that the next turn holds for certain
	replyChat                          // choices[].delta.content, or message.content
	replyCompletion                    // choices[].text
)

// Begin makes r ready for the answer to p, whose Blocks were made. It reports
// whether the answer can have blocks at all. p is not kept.
func (r *Reply) Begin(p *Prompt) bool {
	r.format, r.blocks, r.alike.before = replyNone, r.blocks[:0], 0
	if cap(r.text) > keepReplyBytes {
		r.text = nil
	}
	if cap(r.key)+cap(r.call.args) > keepReplyBytes {
		r.key, r.call = nil, call{}
	}
	r.call = call{name: r.call.name[:0], args: r.call.args[:0]}
	if p.chain.blockBytes == 0 || p.Sequences > 1 {
		return false
	}
	r.hash, r.size = p.chain.hash, p.chain.blockBytes
	r.text = append(r.text[:0], p.Text[len(p.Text)-p.chain.rest:]...)
	switch {
	case p.form == formText && !p.echo:
		r.format = replyCompletion
	case p.form == formChat && !p.turns.answered && len(p.turns.reasoning) == 0:
		// With the last message an assistant's, the answer may go on with it; and
		// reasoning in the prompt is dropped when the user speaks again.
		r.format = replyChat
		r.text = append(append(r.text, markMessage), "assistant"...)
		r.text = append(r.text, markText)
	}
	return r.format != replyNone
}

// Event takes one event of a streamed answer, without its "data:".
func (r *Reply) Event(data []byte) {
	if !r.full() && !r.again(data) && r.read(data, "delta") {
		r.learn(data)
	}
	r.usage = nil
}

// Whole takes an answer that came in one piece. It returns what lies under "usage"
// there, as it passes that anyway; nil when it did not see any.
func (r *Reply) Whole(body []byte) (usage []byte) {
	if !r.full() {
		r.read(body, "message")
	}
	usage, r.usage = r.usage, nil
	return usage
}

// Lost says that a part of the answer was not seen.
func (r *Reply) Lost() { r.format = replyNone }

// End returns what the answer makes, nil when it makes none for certain. The
// answer is over; the result is valid until the next Begin.
func (r *Reply) End() []Block {
	if r.format == replyNone {
		return nil
	}
	r.endCall()
	r.chain()
	return r.blocks
}

// full reports whether nothing of what may still come is kept.
func (r *Reply) full() bool { return r.format == replyNone || len(r.blocks) == mostReplyBlocks }

// read takes the text out of the answer, or a part of it, in data, and reports
// whether it was read to its end.
func (r *Reply) read(data []byte, part string) bool {
	r.scan.b, r.usage, r.trace = data, nil, trace{}
	return r.finish(r.object(part))
}

// finish ends the reading of what could not be read, and then is Lost, or was.
func (r *Reply) finish(err error) bool {
	if err != nil {
		r.Lost()
	}
	r.scan.b = nil
	r.chain()
	return err == nil
}

func (r *Reply) object(part string) error {
	i := r.scan.space(0)
	if r.scan.at(i) != '{' {
		return r.scan.fail(i, "an object")
	}
	return r.members(i+1, part)
}

// members reads an answer from behind its opening brace or one of its members.
func (r *Reply) members(i int, part string) error {
	s := &r.scan
	for {
		key, at, ok, err := s.member(i)
		if !ok {
			return err
		}
		name := r.name(key)
		choices, usage := string(name) == "choices", r.usage == nil && string(name) == "usage"
		if choices && s.at(at) == '[' {
			i, err = r.choices(at+1, part)
		} else {
			i, err = s.skip(at)
		}
		if err != nil {
			return err
		}
		if usage {
			r.usage = s.b[at:i:i]
		}
		if r.trace.choices == 0 && r.trace.texts > 0 {
			r.trace.choices = i
		}
	}
}

// choices reads the list whose bracket is right before i. There is one choice,
// as only one was asked for.
func (r *Reply) choices(i int, part string) (int, error) {
	for {
		at, ok, err := r.scan.element(i)
		if !ok {
			return at, err
		}
		if r.scan.at(at) != '{' {
			r.Lost()
			i, err = r.scan.skip(at)
		} else {
			i, err = r.choice(at+1, part)
		}
		if err != nil {
			return 0, err
		}
	}
}

func (r *Reply) choice(i int, part string) (int, error) {
	s := &r.scan
	for {
		key, at, ok, err := s.member(i)
		if !ok {
			return at, err
		}
		name := r.name(key)
		switch {
		case r.format == replyCompletion && string(name) == "text" && s.at(at) == '"':
			i, err = r.take(at)
		case r.format == replyChat && string(name) == part && s.at(at) == '{':
			i, err = r.message(at + 1)
		default:
			i, err = s.skip(at)
		}
		if err != nil {
			return 0, err
		}
	}
}

// message reads the object whose brace is right before i: a message, or a part
// of one.
func (r *Reply) message(i int) (int, error) {
	s := &r.scan
	for {
		key, at, ok, err := s.member(i)
		if !ok {
			return at, err
		}
		switch string(r.name(key)) {
		case "content":
			if s.at(at) == '"' && r.call.number == 0 {
				i, err = r.take(at)
				break
			}
			i, err = r.absent(at) // text behind a call would come before it in the next turn
		case "tool_calls":
			i, err = r.calls(at)
		case "role":
			i, err = s.skip(at)
		default: // reasoning, audio, whatever they will be called
			i, err = r.absent(at)
		}
		if err != nil {
			return 0, err
		}
	}
}

// take appends the string at i to the text.
func (r *Reply) take(i int) (end int, err error) {
	r.text, end, err = r.scan.appendString(r.text, i)
	r.trace.texts++
	r.trace.from, r.trace.to = i+1, end
	return end, err
}

// name returns a key with its escapes undone, valid until the next call.
func (r *Reply) name(key value) []byte {
	if !key.escaped {
		return r.scan.b[key.start+1 : key.end-1]
	}
	r.key, _, _ = r.scan.appendString(r.key[:0], key.start) // it was checked
	return r.key
}

// absent skips the value at i, which is there if it is anything but null or empty.
func (r *Reply) absent(i int) (int, error) {
	end, err := r.scan.skip(i)
	if err == nil {
		switch string(r.scan.b[i:end]) {
		case "null", `""`, "[]":
		default:
			r.Lost()
		}
	}
	return end, err
}

// chain makes blocks of what fills them.
func (r *Reply) chain() {
	rest := r.text
	for len(rest) >= r.size && len(r.blocks) < mostReplyBlocks {
		r.hash = xxh3.HashSeed(rest[:r.size], r.hash)
		r.blocks = append(r.blocks, Block(r.hash))
		rest = rest[r.size:]
	}
	r.text = slices.Delete(r.text, 0, len(r.text)-len(rest))
}
