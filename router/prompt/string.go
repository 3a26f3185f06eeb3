package prompt

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"unicode/utf16"
	"unicode/utf8"
)

// Strings are looked at eight bytes at a time, each a byte of one word. There
// "x - c < 0" for the bytes of a word sets their top bits; a borrow can only
// come from a byte that is itself a hit, so the lowest hit is always a true
// one. Bytes of UTF-8 sequences have their top bits set before and are masked out.
const (
	each01 = 0x0101010101010101
	each02 = 0x0202020202020202
	each21 = 0x2121212121212121
	each5c = 0x5c5c5c5c5c5c5c5c
	each80 = 0x8080808080808080
)

// special marks, by the top bit of its byte, each quote, backslash and control
// character of x. Flipping bit 1 puts the quote (0x22) right behind the control
// characters, so that one comparison finds both.
func special(x uint64) uint64 {
	return (((x ^ each02) - each21) | ((x ^ each5c) - each01)) &^ x & each80
}

// str checks the string whose opening quote is at i and returns the index
// behind its closing quote.
func (s *scanner) str(i int) (end int, escaped bool, err error) {
	i++
	for range 2 { // keys and most values outside of texts are short
		if len(s.b)-i >= 8 {
			if m := special(binary.LittleEndian.Uint64(s.b[i:])); m != 0 {
				i += bits.TrailingZeros64(m) >> 3
				break
			}
			i += 8
		}
	}
	for {
		switch c := s.at(i); {
		case c == '"':
			return i + 1, escaped, nil
		case c == '\\':
			escaped = true
			if _, i, err = s.escape(i); err != nil {
				return 0, false, err
			}
		case c < ' ':
			return 0, false, s.fail(i, "the rest of a string")
		default:
			i++
		}
		// What it writes is of no use, and costs less than a loop without it.
		read, written := unescape(s.unread[:], s.b[i:])
		i, escaped = i+read, escaped || read > written
	}
}

// appendString checks the string whose opening quote is at i, appends it to dst
// with its escapes undone, and returns the index behind its closing quote.
// Checking and copying in one go is what keeps long prompts cheap: each escape
// costs the processor a wrong guess, and so only one.
func (s *scanner) appendString(dst []byte, i int) (_ []byte, end int, err error) {
	i++
	b, out, j := s.b, dst[:cap(dst)], len(dst)
	for {
		read, written := unescape(out[j:], b[i:])
		i, j = i+read, j+written
		if len(out)-j < stepBytes {
			out = slices.Grow(out[:j], max(stepBytes, min(len(b)-i, growBytes)))
			out = out[:cap(out)]
			continue
		}
		switch c := s.at(i); {
		case c == '\\':
			var r rune
			if r, i, err = s.escape(i); err != nil {
				return dst, 0, err
			}
			if out[j] = byte(r); r < utf8.RuneSelf {
				j++
			} else {
				j += utf8.EncodeRune(out[j:], r)
			}
		case c == '"':
			return out[:j], i + 1, nil
		case c < ' ':
			return dst, 0, s.fail(i, "the rest of a string")
		default: // among the last bytes of the body, fewer than out has room for
			for c >= ' ' && c != '"' && c != '\\' {
				out[j] = c
				i, j = i+1, j+1
				c = s.at(i)
			}
		}
	}
}

// stepBytes is how much unescape has to have before it, and room for.
const stepBytes = 40

// unescape copies text from src to dst and undoes the escapes of one letter. It
// stops at any other special byte, and when less than stepBytes are left of
// either; whatever dst holds beyond what was written is overwritten.
func unescape(dst, src []byte) (read, written int) {
	from, to := src, dst
	for len(from) >= stepBytes && len(to) >= stepBytes {
		// Before it is known how much of them counts.
		copy(to[:16], from[:16])
		copy(to[16:32], from[16:32])
		k := 0
		m, n := special(binary.LittleEndian.Uint64(from)), special(binary.LittleEndian.Uint64(from[8:]))
		if m|n == 0 {
			m, n = special(binary.LittleEndian.Uint64(from[16:])), special(binary.LittleEndian.Uint64(from[24:]))
			if m|n == 0 {
				from, to = from[32:], to[32:]
				continue
			}
			k = 16
		}
		// The top bit says that neither is 0, which the processor need not see to then.
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
		// Code is full of escapes in a row.
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

// growBytes is by how much a buffer grows at least, if so much is left to read.
const growBytes = 16 << 10

// escape checks the escape sequence at i, which begins with a backslash. It
// returns what it stands for and the index behind it. A surrogate without its
// partner becomes U+FFFD: vLLM refuses the prompt it stands in, so here it only
// has to do no harm.
func (s *scanner) escape(i int) (rune, int, error) {
	c := s.at(i + 1)
	if r := escapes[c]; r != 0 {
		return rune(r), i + 2, nil
	}
	if c != 'u' {
		return 0, 0, s.fail(i+1, "an escape character")
	}
	r, err := s.hex4(i + 2)
	if err != nil || !utf16.IsSurrogate(r) {
		return r, i + 6, err
	}
	if s.at(i+6) == '\\' && s.at(i+7) == 'u' {
		low, err := s.hex4(i + 8)
		if err != nil {
			return 0, 0, err
		}
		if pair := utf16.DecodeRune(r, low); pair != utf8.RuneError {
			return pair, i + 12, nil
		}
	}
	return utf8.RuneError, i + 6, nil
}

// hex4 reads the four hexadecimal digits at i.
func (s *scanner) hex4(i int) (r rune, err error) {
	var bad byte
	for k := i; k < i+4; k++ {
		d := hexDigits[s.at(k)] - 1 // 0xff for what is no digit
		bad |= d
		r = r<<4 | rune(d)
	}
	if bad == 0xff {
		for hexDigits[s.at(i)] != 0 {
			i++
		}
		return 0, s.fail(i, "a hexadecimal digit")
	}
	return r, nil
}

// Tables, never written: what stands in an escape is noise to a branch predictor.
var (
	// escapes holds what the one-letter escapes stand for.
	escapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}
	// hexDigits holds the values of hexadecimal digits, plus one.
	hexDigits = [256]byte{
		'0': 1, '1': 2, '2': 3, '3': 4, '4': 5, '5': 6, '6': 7, '7': 8, '8': 9, '9': 10,
		'a': 11, 'b': 12, 'c': 13, 'd': 14, 'e': 15, 'f': 16,
		'A': 11, 'B': 12, 'C': 13, 'D': 14, 'E': 15, 'F': 16,
	}
)

// appendMinified appends the value v without white space and escapes. Quotes
// become markQuote, which no text holds, so that undoing the escapes does not
// make two values alike.
func (s *scanner) appendMinified(dst []byte, v value) []byte {
	for i := v.start; i < v.end; {
		switch c := s.b[i]; c {
		case ' ', '\t', '\n', '\r':
			i++
		case '"':
			dst, i, _ = s.appendString(append(dst, markQuote), i) // v was checked
			dst = append(dst, markQuote)
		default:
			dst = append(dst, c)
			i++
		}
	}
	return dst
}
