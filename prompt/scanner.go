package prompt

import "fmt"

// maxDepth bounds the nesting of arrays and objects. vLLM's own parser fails somewhere
// past a thousand.
const maxDepth = 512

// scanner checks JSON syntax and finds values in b, which must be valid UTF-8. It
// decodes nothing and does not recurse.
type scanner struct {
	b     []byte
	stack [maxDepth]byte // opening brackets of the open containers
	media int            // bytes of media strings, less their nominal lengths

	noteTransferParams bool   // parseKey sets transferParams
	transferParams     string // the first of TransferParamNames that was a key of another value than null; "": none

	discard [256]byte // where parseString writes strings that it only checks
}

// value is the span b[start:end] of one JSON value, quotes and brackets included. The
// zero value is absent.
type value struct {
	start, end int
	escaped    bool // a string with at least one backslash
}

// exists reports whether there is a value, null included.
func (v value) exists() bool { return v.end != 0 }

// firstByte returns the first byte of v, which tells its type; 0 if v is absent.
func (s *scanner) firstByte(v value) byte {
	if !v.exists() {
		return 0
	}
	return s.b[v.start]
}

// notNull reports whether v exists and is not null.
func (s *scanner) notNull(v value) bool { return v.exists() && s.b[v.start] != 'n' }

// skipValue checks the value at i and returns the index after it.
func (s *scanner) skipValue(i int) (end int, err error) {
	v, err := s.parseValue(i, validated)
	return v.end, err
}

// byteAt returns the byte at i, or 0, which starts no JSON token, at the end.
func (s *scanner) byteAt(i int) byte {
	if i < len(s.b) {
		return s.b[i]
	}
	return 0
}

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

// syntaxError returns the error for the byte at i.
func (s *scanner) syntaxError(i int, want string) error {
	if i >= len(s.b) {
		return &Error{Message: fmt.Sprintf("the request body is not valid JSON: it ends at byte %d, where %s was expected", len(s.b), want)}
	}
	return &Error{Message: fmt.Sprintf("the request body is not valid JSON: %q at byte %d, where %s was expected", s.b[i], i, want)}
}

// validated is the depth to pass for a value that was checked before.
const validated = 0

// parseValue checks the value at i, inside depth open containers.
func (s *scanner) parseValue(i, depth int) (value, error) {
	v := value{start: i}
	open := depth
	var err error
	for {
		switch c := s.byteAt(i); c {
		case '"':
			begin := i
			if i, v.escaped, err = s.parseString(i); err != nil {
				return value{}, err
			}
			if i-begin > MediaBytes && isBase64OrDataURL(s.b[begin+1:i-1]) {
				s.media += i - begin - MediaBytes
			}
		case '{', '[':
			if open == maxDepth {
				return value{}, &Error{Message: fmt.Sprintf("the request body nests deeper than %d levels", maxDepth)}
			}
			s.stack[open] = c
			open++
			i = s.skipSpace(i + 1)
			if s.byteAt(i) != closingBracket(c) {
				if c == '{' {
					if _, i, err = s.parseKey(i); err != nil {
						return value{}, err
					}
				}
				continue
			}
			open--
			i++
		default:
			if i, err = s.parseScalar(i); err != nil {
				return value{}, err
			}
		}
		if i, open, err = s.skipToNextValue(i, open, depth); err != nil {
			return value{}, err
		}
		if open == depth {
			v.end = i
			return v, nil
		}
	}
}

// skipToNextValue moves from the end of a value to the start of the next one, or out of
// the containers that end here, until only depth of them are open. It returns the index
// there and the number of open containers.
func (s *scanner) skipToNextValue(i, open, depth int) (next, stillOpen int, err error) {
	for open > depth {
		i = s.skipSpace(i)
		in := s.stack[open-1]
		switch s.byteAt(i) {
		case ',':
			i = s.skipSpace(i + 1)
			if in == '{' {
				var err error
				if _, i, err = s.parseKey(i); err != nil {
					return 0, 0, err
				}
			}
			return i, open, nil
		case closingBracket(in):
			open--
			i++
		default:
			return 0, 0, s.syntaxError(i, fmt.Sprintf("',' or '%c'", closingBracket(in)))
		}
	}
	return i, open, nil
}

// closingBracket relies on ASCII, in which both pairs are two apart.
func closingBracket(bracket byte) byte { return bracket + 2 }

// parseKey checks the object key at i and its colon. It returns the key and the index of
// its value.
func (s *scanner) parseKey(i int) (key value, valueStart int, err error) {
	if s.byteAt(i) != '"' {
		return value{}, 0, s.syntaxError(i, "an object key")
	}
	end, escaped, err := s.parseString(i)
	if err != nil {
		return value{}, 0, err
	}
	colon := s.skipSpace(end)
	if s.byteAt(colon) != ':' {
		return value{}, 0, s.syntaxError(colon, "':'")
	}
	key, valueStart = value{i, end, escaped}, s.skipSpace(colon+1)
	if s.noteTransferParams && s.byteAt(valueStart) != 'n' {
		for _, name := range TransferParamNames {
			if s.isString(key, name) {
				s.transferParams = name
			}
		}
	}
	return key, valueStart, nil
}

// isString reports whether v is a string whose text is want, which is ASCII, however it is escaped.
func (s *scanner) isString(v value, want string) bool {
	n := 0
	for i := v.start + 1; i < v.end-1; n++ {
		c := rune(s.b[i])
		if c == '\\' {
			c, i, _ = s.parseEscape(i) // v was checked
		} else {
			i++
		}
		if n == len(want) || c != rune(want[n]) {
			return false
		}
	}
	return n == len(want)
}

// nextMember moves to the next member of an object. i is right after the opening brace
// or after a member's value. At the end of the object, ok is false and at is the index
// after it.
func (s *scanner) nextMember(i int) (key value, at int, ok bool, err error) {
	// A value never ends in an opening bracket.
	first := s.b[i-1] == '{'
	i = s.skipSpace(i)
	switch c := s.byteAt(i); {
	case c == '}':
		return value{}, i + 1, false, nil
	case first:
	case c == ',':
		i = s.skipSpace(i + 1)
	default:
		return value{}, 0, false, s.syntaxError(i, "',' or '}'")
	}
	key, at, err = s.parseKey(i)
	return key, at, err == nil, err
}

// nextElement is nextMember for arrays.
func (s *scanner) nextElement(i int) (at int, ok bool, err error) {
	first := s.b[i-1] == '['
	i = s.skipSpace(i)
	switch c := s.byteAt(i); {
	case c == ']':
		return i + 1, false, nil
	case first:
		return i, true, nil
	case c == ',':
		return s.skipSpace(i + 1), true, nil
	}
	return 0, false, s.syntaxError(i, "',' or ']'")
}

// parseScalar checks the number or literal at i and returns the index after it.
func (s *scanner) parseScalar(i int) (end int, err error) {
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
		return 0, s.syntaxError(i, "a value")
	}
	for k := range len(word) {
		if s.byteAt(i+k) != word[k] {
			return 0, s.syntaxError(i+k, word)
		}
	}
	return i + len(word), nil
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// parseNumber checks the number at i and returns the index after it.
func (s *scanner) parseNumber(i int) (end int, err error) {
	if s.b[i] == '-' {
		i++
	}
	if s.byteAt(i) == '0' {
		i++
	} else if i, err = s.skipDigits(i); err != nil {
		return 0, err
	}
	if s.byteAt(i) == '.' {
		if i, err = s.skipDigits(i + 1); err != nil {
			return 0, err
		}
	}
	if c := s.byteAt(i); c == 'e' || c == 'E' {
		i++
		if c := s.byteAt(i); c == '+' || c == '-' {
			i++
		}
		return s.skipDigits(i)
	}
	return i, nil
}

// skipDigits skips at least one digit.
func (s *scanner) skipDigits(i int) (end int, err error) {
	if !isDigit(s.byteAt(i)) {
		return 0, s.syntaxError(i, "a digit")
	}
	for isDigit(s.byteAt(i)) {
		i++
	}
	return i, nil
}
