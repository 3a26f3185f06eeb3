package prompt

import (
	"fmt"
	"iter"
)

// maxDepth bounds the nesting of arrays and objects. vLLM's own parser fails somewhere
// past a thousand.
const maxDepth = 512

// scanner reads the JSON in b, which must be valid UTF-8, once from its beginning to its
// end. It checks the syntax, decodes nothing and does not recurse. It keeps the first
// error: then nothing more is read, values are absent and loops over members end.
type scanner struct {
	b []byte
	position
	key value // of the member that nextMember moved to
	err error // the first

	stack [maxDepth]byte // opening brackets of the open containers that readValue has met
	media int            // bytes of media strings, less their nominal lengths

	noteTransferParams bool   // parseKey sets transferParams
	transferParams     string // the first of TransferParamNames that was a key of another value than null; "": none

	scratch []byte    // what unquote returns
	discard [256]byte // where parseString writes strings that it only checks
}

// position is a place in a body.
type position struct {
	at   int // index of the next byte
	open int // how many containers are open there
}

// value is the span b[start:end] of one JSON value, quotes and brackets included. The
// zero value is absent.
type value struct {
	start, end int
	escaped    bool // a string with at least one backslash
}

// exists reports whether there is a value, null included.
func (v value) exists() bool { return v.end != 0 }

// reset prepares the scanner to read b.
func (s *scanner) reset(b []byte) { s.b, s.position, s.err = b, position{}, nil }

// firstByte returns the first byte of v, which tells its type; 0 if v is absent.
func (s *scanner) firstByte(v value) byte {
	if !v.exists() {
		return 0
	}
	return s.b[v.start]
}

// notNull reports whether v exists and is not null.
func (s *scanner) notNull(v value) bool { return v.exists() && s.b[v.start] != 'n' }

// byteAt returns the byte at i, or 0, which starts no JSON token, at the end.
func (s *scanner) byteAt(i int) byte {
	if i < len(s.b) {
		return s.b[i]
	}
	return 0
}

// peek returns the next byte, or 0 at the end.
func (s *scanner) peek() byte { return s.byteAt(s.at) }

// skipSpace returns the index of the first byte from i on that is not white space.
func (s *scanner) skipSpace(i int) int {
	for i < len(s.b) && s.b[i] <= ' ' {
		switch s.b[i] {
		case ' ', '\t', '\n', '\r':
			i++
		default:
			return i
		}
	}
	return i
}

// fail sets the error, unless there is one.
func (s *scanner) fail(param, message string) {
	if s.err == nil {
		s.err = &Error{Param: param, Message: message}
	}
}

// failSyntax is fail for the byte at i.
func (s *scanner) failSyntax(i int, want string) {
	found := fmt.Sprintf("it ends at byte %d", len(s.b))
	if i < len(s.b) {
		found = fmt.Sprintf("%q at byte %d", s.b[i], i)
	}
	s.fail("", fmt.Sprintf("the request body is not valid JSON: %s, where %s was expected", found, want))
}

// readValue reads the next value.
func (s *scanner) readValue() value {
	v := value{start: s.at}
	i, open := s.at, s.open
	for s.err == nil {
		switch c := s.byteAt(i); c {
		case '"':
			begin := i
			i, v.escaped = s.parseString(i)
			if i-begin > MediaBytes && isBase64OrDataURL(s.b[begin+1:i-1]) {
				s.media += i - begin - MediaBytes
			}
		case '{', '[':
			if open == maxDepth {
				s.fail("", fmt.Sprintf("the request body nests deeper than %d levels", maxDepth))
				return value{}
			}
			s.stack[open] = c
			open++
			i = s.skipSpace(i + 1)
			if s.byteAt(i) != closingBracket(c) {
				if c == '{' {
					_, i = s.parseKey(i)
				}
				continue
			}
			open--
			i++
		default:
			i = s.parseScalar(i)
		}
		if i, open = s.skipToNextValue(i, open); open == s.open && s.err == nil {
			s.at, v.end = i, i
			return v
		}
	}
	return value{}
}

// skipToNextValue moves from the end of a value to the start of the next one, or out of the
// containers that end here and that readValue has opened. It returns the index there and the
// number of open containers.
func (s *scanner) skipToNextValue(i, open int) (next, stillOpen int) {
	for open > s.open {
		i = s.skipSpace(i)
		in := s.stack[open-1]
		switch s.byteAt(i) {
		case ',':
			i = s.skipSpace(i + 1)
			if in == '{' {
				_, i = s.parseKey(i)
			}
			return i, open
		case closingBracket(in):
			open--
			i++
		default:
			s.failSyntax(i, fmt.Sprintf("',' or '%c'", closingBracket(in)))
			return i, open
		}
	}
	return i, open
}

// closingBracket relies on ASCII, in which both pairs are two apart.
func closingBracket(bracket byte) byte { return bracket + 2 }

// parseKey checks the object key at i and its colon. It returns the key and the index of its value.
func (s *scanner) parseKey(i int) (key value, valueStart int) {
	if s.byteAt(i) != '"' {
		s.failSyntax(i, "an object key")
		return value{}, i
	}
	end, escaped := s.parseString(i)
	colon := s.skipSpace(end)
	if s.byteAt(colon) != ':' {
		s.failSyntax(colon, "':'")
	}
	if s.err != nil {
		return value{}, i
	}
	key, valueStart = value{i, end, escaped}, s.skipSpace(colon+1)
	if s.noteTransferParams && s.byteAt(valueStart) != 'n' {
		written := s.unquote(key)
		for _, name := range TransferParamNames {
			if string(written) == name {
				s.transferParams = name
			}
		}
	}
	return key, valueStart
}

// enter enters the container that is next, if it has that opening bracket.
func (s *scanner) enter(bracket byte) (entered bool) {
	if s.peek() != bracket || s.err != nil {
		return false
	}
	s.at++
	s.open++
	return true
}

// nextMember moves to the value of the next member of the object that was entered, and sets
// key. At its end it leaves the object and returns false. The caller reads each value.
func (s *scanner) nextMember() bool {
	if !s.nextItem('{') {
		return false
	}
	s.key, s.at = s.parseKey(s.at)
	return s.err == nil
}

// nextElement is nextMember for arrays.
func (s *scanner) nextElement() bool { return s.nextItem('[') }

// nextItem moves to the next key or element in a container with that opening bracket, or leaves
// it and returns false.
func (s *scanner) nextItem(bracket byte) bool {
	if s.err != nil {
		return false
	}
	i := s.skipSpace(s.at)
	switch c := s.byteAt(i); {
	case c == closingBracket(bracket):
		s.at = i + 1
		s.open--
		return false
	case s.b[s.at-1] == bracket: // the first: no value ends in an opening bracket
	case c == ',':
		i = s.skipSpace(i + 1)
	default:
		s.failSyntax(i, fmt.Sprintf("',' or '%c'", closingBracket(bracket)))
		return false
	}
	s.at = i
	return true
}

// reread has read called at v, a value that was read before, and returns to where it was.
func (s *scanner) reread(v value, read func()) {
	before := s.position
	s.at = v.start
	read()
	s.position = before
}

// elements returns the elements of v, which was read before. There are none unless it is an array.
func (s *scanner) elements(v value) iter.Seq[value] {
	return func(yield func(value) bool) {
		before := s.position
		s.at = v.start
		for more := v.exists() && s.enter('['); more && s.nextElement() && yield(s.readValue()); {
		}
		s.position = before
	}
}

// members returns the keys and values of v, which was read before. There are none unless it is
// an object.
func (s *scanner) members(v value) iter.Seq2[value, value] {
	return func(yield func(key, member value) bool) {
		before := s.position
		s.at = v.start
		for more := v.exists() && s.enter('{'); more && s.nextMember() && yield(s.key, s.readValue()); {
		}
		s.position = before
	}
}

// readMembers reads the next value. If it is an object it returns the members with these names,
// at most five. Of equal keys the last counts, as in vLLM.
func (s *scanner) readMembers(names ...string) (found [5]value) {
	if !s.enter('{') {
		s.readValue()
		return found
	}
	for s.nextMember() {
		i := 0
		for key := s.unquote(s.key); i < len(names) && names[i] != string(key); i++ {
		}
		if v := s.readValue(); i < len(names) {
			found[i] = v
		}
	}
	return found
}

// findMembers is readMembers for a value that was read before.
func (s *scanner) findMembers(v value, names ...string) (found [5]value) {
	if v.exists() {
		s.reread(v, func() { found = s.readMembers(names...) })
	}
	return found
}

// member returns the member of v with that name, absent if there is none.
func (s *scanner) member(v value, name string) value { return s.findMembers(v, name)[0] }

// unquote returns the string v without escapes, and any other value as it is written.
// The result is valid until the next call, or until a key is read.
func (s *scanner) unquote(v value) []byte {
	if s.firstByte(v) != '"' {
		return s.b[v.start:v.end]
	}
	if !v.escaped {
		return s.b[v.start+1 : v.end-1]
	}
	s.scratch, _ = s.appendString(s.scratch[:0], v.start)
	return s.scratch
}

// stringOf returns the string v without escapes, and nothing for any other value. The result is
// valid as long as that of unquote.
func (s *scanner) stringOf(v value) []byte {
	if s.firstByte(v) != '"' {
		return nil
	}
	return s.unquote(v)
}

// parseScalar checks the number or literal at i and returns the index after it.
func (s *scanner) parseScalar(i int) (end int) {
	var word string
	switch c := s.byteAt(i); {
	case c == '-' || isDigit(c):
		return s.parseNumber(i)
	case c == 't':
		word = "true"
	case c == 'f':
		word = "false"
	case c == 'n':
		word = "null"
	default:
		s.failSyntax(i, "a value")
		return i
	}
	for k := range len(word) {
		if s.byteAt(i+k) != word[k] {
			s.failSyntax(i+k, word)
			break
		}
	}
	return i + len(word)
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// parseNumber checks the number at i and returns the index after it.
func (s *scanner) parseNumber(i int) (end int) {
	if s.b[i] == '-' {
		i++
	}
	if s.byteAt(i) == '0' {
		i++
	} else {
		i = s.skipDigits(i)
	}
	if s.byteAt(i) == '.' {
		i = s.skipDigits(i + 1)
	}
	if c := s.byteAt(i); c == 'e' || c == 'E' {
		i++
		if c := s.byteAt(i); c == '+' || c == '-' {
			i++
		}
		i = s.skipDigits(i)
	}
	return i
}

// skipDigits skips at least one digit.
func (s *scanner) skipDigits(i int) (end int) {
	if !isDigit(s.byteAt(i)) {
		s.failSyntax(i, "a digit")
	}
	for isDigit(s.byteAt(i)) {
		i++
	}
	return i
}
