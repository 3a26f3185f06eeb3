package prompt

import "fmt"

// maxDepth bounds how deep arrays and objects nest. vLLM's own JSON parser
// gives up somewhere past a thousand; no client needs a hundred.
const maxDepth = 512

// scanner checks JSON syntax and finds where values lie in b. It decodes
// nothing and does not recurse: a body made of brackets costs one array of
// maxDepth bytes. That b is valid UTF-8 is checked by the caller.
type scanner struct {
	b     []byte
	stack [maxDepth]byte // the opening bracket of each container that value is in
	media int            // bytes of media that value passed, less their nominal lengths

	unread [256]byte // where str has strings unescaped that it only checks
}

// value is where one JSON value lies: b[start:end], quotes and brackets
// included. The zero value is a value that is not there.
type value struct {
	start, end int
	escaped    bool // a string with at least one backslash
}

// given reports whether there is a value at all, null included.
func (v value) given() bool { return v.end != 0 }

// first returns the first byte of v, which tells its type, or 0 when v is not there.
func (s *scanner) first(v value) byte {
	if !v.given() {
		return 0
	}
	return s.b[v.start]
}

// set reports whether v is there and is not null.
func (s *scanner) set(v value) bool { return v.given() && s.b[v.start] != 'n' }

// skip checks the value at i and returns the index behind it.
func (s *scanner) skip(i int) (int, error) {
	v, err := s.value(i, checked)
	return v.end, err
}

// at returns the byte at i, or 0, which begins no JSON token, at the end.
func (s *scanner) at(i int) byte {
	if i < len(s.b) {
		return s.b[i]
	}
	return 0
}

// space returns the index of the first byte from i that is not white space.
func (s *scanner) space(i int) int {
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

// fail makes the error for the byte at i.
func (s *scanner) fail(i int, want string) error {
	if i >= len(s.b) {
		return &Error{Message: fmt.Sprintf("the request body is not valid JSON: it ends after %d bytes, where %s was expected", len(s.b), want)}
	}
	return &Error{Message: fmt.Sprintf("the request body is not valid JSON: %q at byte %d, where %s was expected", s.b[i], i, want)}
}

// checked is the depth to give for a value that was found valid before.
const checked = 0

// value checks the value that begins at i, inside depth open containers.
func (s *scanner) value(i, depth int) (value, error) {
	v := value{start: i}
	open := depth
	var err error
	for {
		switch c := s.at(i); c {
		case '"':
			begin := i
			if i, v.escaped, err = s.str(i); err != nil {
				return value{}, err
			}
			if i-begin > mediaBytes && isMedia(s.b[begin+1:i-1]) {
				s.media += i - begin - mediaBytes
			}
		case '{', '[':
			if open == maxDepth {
				return value{}, &Error{Message: fmt.Sprintf("the request body nests deeper than %d levels", maxDepth)}
			}
			s.stack[open] = c
			open++
			i = s.space(i + 1)
			if s.at(i) != closing(c) {
				if c == '{' {
					if _, i, err = s.key(i); err != nil {
						return value{}, err
					}
				}
				continue
			}
			open--
			i++
		default:
			if i, err = s.scalar(i); err != nil {
				return value{}, err
			}
		}
		if i, open, err = s.behind(i, open, depth); err != nil {
			return value{}, err
		}
		if open == depth {
			v.end = i
			return v, nil
		}
	}
}

// behind moves from the end of a value to the start of the next one, or out of
// the containers that end here, until only depth of them are open.
func (s *scanner) behind(i, open, depth int) (int, int, error) {
	for open > depth {
		i = s.space(i)
		in := s.stack[open-1]
		switch s.at(i) {
		case ',':
			i = s.space(i + 1)
			if in == '{' {
				var err error
				if _, i, err = s.key(i); err != nil {
					return 0, 0, err
				}
			}
			return i, open, nil
		case closing(in):
			open--
			i++
		default:
			return 0, 0, s.fail(i, fmt.Sprintf("',' or '%c'", closing(in)))
		}
	}
	return i, open, nil
}

// closing returns the bracket that closes the one given: in ASCII both pairs
// are two apart.
func closing(bracket byte) byte { return bracket + 2 }

// key checks the object key at i and its colon, and returns where its value begins.
func (s *scanner) key(i int) (value, int, error) {
	if s.at(i) != '"' {
		return value{}, 0, s.fail(i, "an object key")
	}
	end, escaped, err := s.str(i)
	if err != nil {
		return value{}, 0, err
	}
	colon := s.space(end)
	if s.at(colon) != ':' {
		return value{}, 0, s.fail(colon, "':'")
	}
	return value{i, end, escaped}, s.space(colon + 1), nil
}

// member goes to the next member of an object. i stands right behind the
// opening brace or behind a member's value. When the object ends, ok is false
// and at is the index behind it.
func (s *scanner) member(i int) (key value, at int, ok bool, err error) {
	// A value never ends in an opening bracket, so this tells the two apart.
	first := s.b[i-1] == '{'
	i = s.space(i)
	switch c := s.at(i); {
	case c == '}':
		return value{}, i + 1, false, nil
	case first:
	case c == ',':
		i = s.space(i + 1)
	default:
		return value{}, 0, false, s.fail(i, "',' or '}'")
	}
	key, at, err = s.key(i)
	return key, at, err == nil, err
}

// element is member for arrays.
func (s *scanner) element(i int) (at int, ok bool, err error) {
	first := s.b[i-1] == '['
	i = s.space(i)
	switch c := s.at(i); {
	case c == ']':
		return i + 1, false, nil
	case first:
		return i, true, nil
	case c == ',':
		return s.space(i + 1), true, nil
	}
	return 0, false, s.fail(i, "',' or ']'")
}

// scalar checks the number or literal at i.
func (s *scanner) scalar(i int) (int, error) {
	var word string
	switch c := s.at(i); {
	case c == '-' || digit(c):
		return s.number(i)
	case c == 't':
		word = "true"
	case c == 'f':
		word = "false"
	case c == 'n':
		word = "null"
	default:
		return 0, s.fail(i, "a value")
	}
	for k := range len(word) {
		if s.at(i+k) != word[k] {
			return 0, s.fail(i+k, word)
		}
	}
	return i + len(word), nil
}

func digit(c byte) bool { return '0' <= c && c <= '9' }

func (s *scanner) number(i int) (int, error) {
	if s.b[i] == '-' {
		i++
	}
	var err error
	if s.at(i) == '0' {
		i++
	} else if i, err = s.digits(i); err != nil {
		return 0, err
	}
	if s.at(i) == '.' {
		if i, err = s.digits(i + 1); err != nil {
			return 0, err
		}
	}
	if c := s.at(i); c == 'e' || c == 'E' {
		i++
		if c := s.at(i); c == '+' || c == '-' {
			i++
		}
		return s.digits(i)
	}
	return i, nil
}

// digits skips digits, at least one.
func (s *scanner) digits(i int) (int, error) {
	if !digit(s.at(i)) {
		return 0, s.fail(i, "a digit")
	}
	for digit(s.at(i)) {
		i++
	}
	return i, nil
}
