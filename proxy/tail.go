package proxy

import (
	"bytes"
	"io"
	"net/http"

	"github.com/tidwall/gjson"
)

// tailBytes is how much of the end of a long answer is kept: vLLM writes usage
// behind the choices, and little comes behind it.
const tailBytes = 2 << 10

// source is a long answer as it is read. It remembers why reading ended, which
// io.Copy does not tell from why writing did, and the end of what was read.
type source struct {
	io.Reader
	err    error
	passed int
	last   []byte // at most tailBytes
}

func (s *source) Read(p []byte) (n int, err error) {
	n, s.err = s.Reader.Read(p)
	s.passed += n
	if n >= tailBytes {
		s.last = append(s.last[:0], p[n-tailBytes:n]...)
	} else if s.last = append(s.last, p[:n]...); len(s.last) > tailBytes {
		s.last = s.last[:copy(s.last, s.last[len(s.last)-tailBytes:])]
	}
	return n, s.err
}

// learnLong takes the account of its tokens from the end of an answer that was not
// held whole. The quotes of a text inside the answer are escaped, so it cannot be
// mistaken for the account. Where there is none, what came counts by its length,
// up to what was asked for: else a long answer would cost its key nothing.
func (a *attempt) learnLong(s *source, before int) {
	if a.endpoint.format == plainFormat || a.outcome.Code >= http.StatusMultipleChoices {
		return
	}
	var u usage
	if _, object, found := bytes.Cut(s.last, []byte(`"usage":`)); found {
		u.read(gjson.ParseBytes(object), a.endpoint.format)
	}
	a.observe(&u)
	if u.answerTokens > 0 {
		return
	}
	a.unread = (before + s.passed) / bytesPerToken
	if most := a.input.request.MaxAnswerTokens * max(a.input.request.Sequences, 1); most > 0 {
		a.unread = min(a.unread, most)
	}
}
