package prompt

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"unicode/utf16"
	"unicode/utf8"
)

// Strings are searched eight bytes at a time, as the bytes of one word. "x - c < 0" sets the top
// bit of a byte; a borrow can only come from a byte that is itself a hit, so the lowest hit is
// always a true one. Bytes of UTF-8 sequences, whose top bits are set, are masked out.
const (
	each01 = 0x0101010101010101
	each02 = 0x0202020202020202
	each21 = 0x2121212121212121
	each5c = 0x5c5c5c5c5c5c5c5c
	each80 = 0x8080808080808080
)

// markSpecialBytes sets the top bit of the byte of each quote, backslash and control
// character of x. Flipping bit 1 puts the quote (0x22) next to the control
// characters, so that one comparison finds both.
func markSpecialBytes(word uint64) uint64 {
	return (((word ^ each02) - each21) | ((word ^ each5c) - each01)) &^ word & each80
}

// parseString checks the string whose opening quote is at i and returns the index after
// its closing quote.
func (s *scanner) parseString(i int) (end int, escaped bool) {
	i++
	for range 2 { // most strings are short
		if len(s.b)-i >= 8 {
			if m := markSpecialBytes(binary.LittleEndian.Uint64(s.b[i:])); m != 0 {
				i += bits.TrailingZeros64(m) >> 3
				break
			}
			i += 8
		}
	}
	for {
		switch c := s.byteAt(i); {
		case c == '"':
			return i + 1, escaped
		case c == '\\':
			escaped = true
			if _, i = s.parseEscape(i); s.err != nil {
				return i, false
			}
		case c < ' ':
			s.failSyntax(i, "the rest of a string")
			return i, false
		default:
			i++
		}
		// The output is discarded; a loop without it is slower.
		read, written := unescapeUntilSpecial(s.discard[:], s.b[i:])
		i, escaped = i+read, escaped || read > written
	}
}

// readString reads the string that is next and appends it to dst without escapes.
func (s *scanner) readString(dst []byte) []byte {
	dst, s.at = s.appendString(dst, s.at)
	return dst
}

// appendString checks the string whose opening quote is at i, appends it to dst without
// escapes, and returns the index after its closing quote. It checks and copies in one
// pass, because each escape costs a branch misprediction.
func (s *scanner) appendString(dst []byte, i int) (_ []byte, end int) {
	i++
	b, out, j := s.b, dst[:cap(dst)], len(dst)
	for {
		read, written := unescapeUntilSpecial(out[j:], b[i:])
		i, j = i+read, j+written
		if len(out)-j < stepBytes {
			out = slices.Grow(out[:j], max(stepBytes, min(len(b)-i, max(growBytes, j))))
			out = out[:cap(out)]
			continue
		}
		switch c := s.byteAt(i); {
		case c == '\\':
			var r rune
			if r, i = s.parseEscape(i); s.err != nil {
				return dst, i
			}
			if out[j] = byte(r); r < utf8.RuneSelf {
				j++
			} else {
				j += utf8.EncodeRune(out[j:], r)
			}
		case c == '"':
			return out[:j], i + 1
		case c < ' ':
			s.failSyntax(i, "the rest of a string")
			return dst, i
		default: // near the end of the body
			for c >= ' ' && c != '"' && c != '\\' {
				out[j] = c
				i, j = i+1, j+1
				c = s.byteAt(i)
			}
		}
	}
}

// stepBytes is the least input and room for output that unescape needs.
const stepBytes = 40

// unescapeUntilSpecial copies text from src to dst and replaces one-letter escapes. It
// stops at any other special byte, and when less than stepBytes are left of either. It may
// overwrite dst beyond what it reports as written.
func unescapeUntilSpecial(dst, src []byte) (read, written int) {
	from, to := src, dst
	for len(from) >= stepBytes && len(to) >= stepBytes {
		// Copied before it is known how many of them count.
		copy(to[:16], from[:16])
		copy(to[16:32], from[16:32])
		k := 0
		m, n := markSpecialBytes(binary.LittleEndian.Uint64(from)), markSpecialBytes(binary.LittleEndian.Uint64(from[8:]))
		if m|n == 0 {
			m, n = markSpecialBytes(binary.LittleEndian.Uint64(from[16:])), markSpecialBytes(binary.LittleEndian.Uint64(from[24:]))
			if m|n == 0 {
				from, to = from[32:], to[32:]
				continue
			}
			k = 16
		}
		// The top bit avoids a branch for 0.
		at := bits.TrailingZeros64(m|1<<63) >> 3
		if m == 0 {
			at = 8 + bits.TrailingZeros64(n|1<<63)>>3
		}
		k += at & 15
		letter := escapes[from[k+1]]
		if from[k] != '\\' || letter == 0 {
			from, to = from[k:], to[k:]
			break
		}
		to[k] = letter
		from, to = from[k+2:], to[k+1:]
		// Escapes in a row are common in code.
		for from[0] == '\\' && len(from) >= 8 && len(to) >= 8 {
			if letter = escapes[from[1]]; letter == 0 {
				break
			}
			to[0] = letter
			from, to = from[2:], to[1:]
		}
	}
	return len(src) - len(from), len(dst) - len(to)
}

const growBytes = 16 << 10

// parseEscape checks the escape sequence at i and returns what it stands for and the
// index after it. A lone surrogate becomes U+FFFD; vLLM rejects such a prompt.
func (s *scanner) parseEscape(i int) (r rune, end int) {
	c := s.byteAt(i + 1)
	if r := escapes[c]; r != 0 {
		return rune(r), i + 2
	}
	if c != 'u' {
		s.failSyntax(i+1, "an escape character")
		return 0, i
	}
	r = s.parseHex4(i + 2)
	if !utf16.IsSurrogate(r) {
		return r, i + 6
	}
	if s.byteAt(i+6) == '\\' && s.byteAt(i+7) == 'u' {
		if pair := utf16.DecodeRune(r, s.parseHex4(i+8)); pair != utf8.RuneError {
			return pair, i + 12
		}
	}
	return utf8.RuneError, i + 6
}

// parseHex4 returns the value of the four hexadecimal digits at i.
func (s *scanner) parseHex4(i int) (r rune) {
	var bad byte
	for k := i; k < i+4; k++ {
		d := hexDigits[s.byteAt(k)] - 1 // 0xff: not a digit
		bad |= d
		r = r<<4 | rune(d)
	}
	if bad != 0xff {
		return r
	}
	for hexDigits[s.byteAt(i)] != 0 {
		i++
	}
	s.failSyntax(i, "a hexadecimal digit")
	return 0
}

// Tables instead of branches, which cannot be predicted here.
var (
	// escapes maps the letters of escapes to what they stand for.
	escapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}
	// hexDigits maps hexadecimal digits to their values plus one.
	hexDigits = [256]byte{
		'0': 1, '1': 2, '2': 3, '3': 4, '4': 5, '5': 6, '6': 7, '7': 8, '8': 9, '9': 10,
		'a': 11, 'b': 12, 'c': 13, 'd': 14, 'e': 15, 'f': 16,
		'A': 11, 'B': 12, 'C': 13, 'D': 14, 'E': 15, 'F': 16,
	}
)

// appendMinified appends the value v without white space and escapes. Quotes become
// markQuote, which no text contains, so that different values stay different.
func (s *scanner) appendMinified(dst []byte, v value) []byte {
	for i := v.start; i < v.end; {
		switch c := s.b[i]; c {
		case ' ', '\t', '\n', '\r':
			i++
		case '"':
			dst, i = s.appendString(append(dst, markQuote), i)
			dst = append(dst, markQuote)
		default:
			dst = append(dst, c)
			i++
		}
	}
	return dst
}
