package prompt

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
)

// Member is a member of a JSON object.
type Member struct {
	Name  string
	Value string // as JSON
}

// Changes are what is changed in a body: members at its top level, and the maximum of its output tokens. Nothing else of
// its bytes is.
type Changes struct {
	Set             []Member // each name once, none of them one of OutputLimitNames if MaxOutputTokens is set
	MaxOutputTokens int      // a larger number of output tokens is reduced to it, and where none is given it is added; 0: no limit
}

// OutputLimitNames are the members by which the APIs limit the output tokens.
var OutputLimitNames = [...]string{"max_tokens", "max_completion_tokens", "max_output_tokens"}

// outputLimits are the members by which a body of each kind limits its output tokens. A body that has none of them gets the first one.
var outputLimits = [numKinds][]string{
	Chat:       {"max_completion_tokens", "max_tokens"},
	Completion: {"max_tokens"},
	Messages:   {"max_tokens"},
	Responses:  {"max_output_tokens"},
	Generate:   {"max_tokens"}, // in sampling_params
}

// defaultCompletionTokens is the API's maximum of a completion without max_tokens.
const defaultCompletionTokens = 16

var errNotObject = errors.New("not a JSON object")

// AppendEdits appends to dst the edits that change a body of a kind, in the order of the body. A member is changed in place,
// also where it is given several times, and one that is missing becomes the first. body is valid UTF-8. It fails if body is
// not a JSON object.
func (c *Changes) AppendEdits(dst []Edit, kind Kind, body []byte) ([]Edit, error) {
	var s scanner
	s.reset(body)
	s.at = s.skipSpace(len(body) - len(bytes.TrimPrefix(body, []byte("\xef\xbb\xbf"))))
	if !s.enter('{') {
		return dst, errNotObject
	}
	o := objectEdits{at: s.at}
	limit := outputLimit{tokens: c.MaxOutputTokens}
	if limit.tokens > 0 && kind != Generate {
		limit.names = outputLimits[kind]
	}
	found := make([]bool, len(c.Set))
	for s.nextMember() {
		o.hasMembers = true
		name := string(s.unquote(s.key))
		v := s.readValue()
		if s.err != nil {
			break
		}
		switch i := slices.IndexFunc(c.Set, func(m Member) bool { return m.Name == name }); {
		case i >= 0:
			found[i] = true
			o.replace(v, c.Set[i].Value)
		case kind == Generate && c.MaxOutputTokens > 0 && name == "sampling_params" && s.firstByte(v) == '{':
			o.edits = s.appendSamplingEdits(o.edits, v, c.MaxOutputTokens)
		default:
			limit.addMember(&o, &s, name, v)
		}
	}
	if s.err == nil {
		if i := s.skipSpace(s.at); i < len(body) {
			s.failSyntax(i, "the end")
		}
	}
	if s.err != nil {
		return dst, s.err
	}
	for i, m := range c.Set {
		if !found[i] {
			o.insert(m)
		}
	}
	limit.finish(&o, kind)
	return o.appendTo(dst), nil
}

// appendSamplingEdits appends the edits that limit the output tokens in v, the sampling_params of a Generate body.
func (s *scanner) appendSamplingEdits(dst []Edit, v value, tokens int) []Edit {
	o := objectEdits{at: v.start + 1}
	limit := outputLimit{names: outputLimits[Generate], tokens: tokens}
	for key, member := range s.members(v) {
		o.hasMembers = true
		limit.addMember(&o, s, string(s.unquote(key)), member)
	}
	limit.finish(&o, Generate)
	return o.appendTo(dst)
}

// objectEdits collects the edits of one JSON object.
type objectEdits struct {
	at         int // index after its opening brace
	hasMembers bool
	inserted   []string
	edits      []Edit // of its values
}

func (o *objectEdits) replace(v value, text string) {
	o.edits = append(o.edits, Edit{v.start, v.end, text})
}

func (o *objectEdits) insert(m Member) {
	name, _ := json.Marshal(m.Name) // a string has no error
	o.inserted = append(o.inserted, string(name)+":"+m.Value)
}

// appendTo appends the edits in the order of the body.
func (o *objectEdits) appendTo(dst []Edit) []Edit {
	if len(o.inserted) > 0 {
		text := strings.Join(o.inserted, ",")
		if o.hasMembers {
			text += ","
		}
		dst = append(dst, Edit{o.at, o.at, text})
	}
	slices.SortStableFunc(o.edits, func(a, b Edit) int { return a.Start - b.Start })
	return append(dst, o.edits...)
}

// outputLimit limits the output tokens that an object asks for.
type outputLimit struct {
	names  []string // of the members that ask for them; a body without any gets the first one
	tokens int
	given  bool    // one of them has a value
	nulls  []value // of the first that are null
}

// addMember edits a member, if it is one by which output tokens are limited. Values that are no numbers are left for the
// replica to refuse, but for strings: it may read them as numbers in more ways than this does.
func (l *outputLimit) addMember(o *objectEdits, s *scanner, name string, v value) {
	if !slices.Contains(l.names, name) {
		return
	}
	switch c := s.firstByte(v); {
	case c == 'n':
		if name == l.names[0] {
			l.nulls = append(l.nulls, v)
		}
		return
	case (c == '"' || c == '-' || isDigit(c)) && !IsAtMost(string(s.unquote(v)), l.tokens):
		o.replace(v, strconv.Itoa(l.tokens))
	}
	l.given = true
}

// IsAtMost reports whether text is a number that is at most n.
func IsAtMost(text string, n int) bool {
	x, err := strconv.ParseFloat(text, 64)
	return err == nil && x <= float64(n)
}

// finish adds the limit where none is given.
func (l *outputLimit) finish(o *objectEdits, kind Kind) {
	if l.given || len(l.names) == 0 {
		return
	}
	tokens := l.tokens
	if kind == Completion {
		tokens = min(tokens, defaultCompletionTokens)
	}
	text := strconv.Itoa(tokens)
	for _, v := range l.nulls {
		o.replace(v, text)
	}
	if len(l.nulls) == 0 {
		o.insert(Member{l.names[0], text})
	}
}

// EditedLength returns the length of a body with edits.
func EditedLength(body []byte, edits []Edit) int {
	n := len(body)
	for i := range edits {
		n += len(edits[i].Text) - (edits[i].End - edits[i].Start)
	}
	return n
}

// AppendEdited appends body with edits to dst. They are in the order of the body and do not overlap.
func AppendEdited(dst, body []byte, edits []Edit) []byte {
	written := 0
	for _, e := range edits {
		dst = append(append(dst, body[written:e.Start]...), e.Text...)
		written = e.End
	}
	return append(dst, body[written:]...)
}
