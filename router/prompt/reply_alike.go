package prompt

import (
	"bytes"
	"slices"
)

// mostAlike bounds what a Reply keeps of an event: a stream that is open for
// minutes keeps it for as long.
const mostAlike = 1 << 10

// alike is what the last event had about its text. The events of a stream differ
// in their text alone, and perhaps behind their choices; so all the rest, once
// read, need only be compared.
type alike struct {
	bytes  []byte // to the text's opening quote, then from behind its closing one to the end of choices
	before int    // how much of bytes stands before the text; 0: nothing is known
}

// trace is what reading an event leaves behind for alike.
type trace struct {
	texts    int // strings that were taken for text
	from, to int // where the last of them lies, without its opening and with its closing quote
	choices  int // where the first list of choices with a text ends
	calls    bool
}

// again takes an event that is like the last one. It returns false, with nothing
// done, for one that is not.
func (r *Reply) again(data []byte) bool {
	k := &r.alike
	if k.before == 0 || r.call.number != 0 || !bytes.HasPrefix(data, k.bytes[:k.before]) {
		return false
	}
	had := len(r.text)
	r.scan.b = data
	text, end, err := r.scan.appendString(r.text, k.before-1)
	r.text = text[:had]
	rest := k.bytes[k.before:]
	if err != nil || !bytes.HasPrefix(data[end:], rest) {
		return false
	}
	r.text = text
	r.finish(r.members(end+len(rest), "delta"))
	return true
}

// learn keeps what data, which was read, has about its text, if nothing else in it
// has a meaning: then that is so as well in the next event that has the same.
func (r *Reply) learn(data []byte) {
	t := &r.trace
	if t.texts != 1 || t.calls || t.from+t.choices-t.to > mostAlike {
		r.alike.before = 0
		return
	}
	kept := slices.Grow(r.alike.bytes[:0], t.from+t.choices-t.to)
	r.alike.bytes = append(append(kept, data[:t.from]...), data[t.to:t.choices]...)
	r.alike.before = t.from
}
