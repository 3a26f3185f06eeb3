package sim

import (
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"

	"warmroute/sim/engine"
)

// params are what the endpoints that generate text have in common.
type params struct {
	model string // as the answer names it
	salt  string
	n     int

	maxTokens, minTokens int // 0: not given
	ignoreEOS            bool

	stream, includeUsage, continuousUsage bool
}

// readParams reads and checks the common fields. limit names the field that
// bounds the answer; the first one given counts.
func (s *Server) readParams(in fields, limits ...string) (params, error) {
	p := params{salt: in["cache_salt"].Str, n: 1, ignoreEOS: in["ignore_eos"].Bool(), stream: in["stream"].Bool()}
	if o := in["stream_options"]; o.IsObject() {
		if !p.stream {
			return p, badParam("stream_options", "Stream options can only be defined when `stream=True`.")
		}
		p.includeUsage = o.Get("include_usage").Bool()
		p.continuousUsage = p.includeUsage && o.Get("continuous_usage_stats").Bool()
	}
	var err error
	if p.model, err = s.resolve(in["model"].Str); err != nil {
		return p, err
	}
	p.minTokens = int(in["min_tokens"].Int())
	for _, key := range limits {
		if !in.has(key) {
			continue
		}
		p.maxTokens = int(in[key].Int())
		if p.maxTokens < 1 {
			return p, badRequest("max_tokens", "max_tokens must be at least 1, got "+strconv.Itoa(p.maxTokens)+
				". (parameter=max_tokens, value="+strconv.Itoa(p.maxTokens)+")")
		}
		break
	}
	if in.has("n") {
		p.n = int(in["n"].Int())
	}
	return p, p.checkSampling(in["temperature"])
}

func (p params) checkSampling(temperature gjson.Result) error {
	if p.n < 1 {
		return badRequest("", "n must be at least 1, got "+strconv.Itoa(p.n)+".")
	}
	if temperature.Type != gjson.Number {
		return nil
	}
	if t := temperature.Num; t < 0 {
		text := strconv.FormatFloat(t, 'f', -1, 64)
		if t == float64(int64(t)) {
			text += ".0"
		}
		return badRequest("temperature", "temperature must be non-negative, got "+text+". (parameter=temperature, value="+text+")")
	}
	if temperature.Num == 0 && p.n > 1 {
		return badRequest("", "n must be 1 when using greedy sampling, got "+strconv.Itoa(p.n)+".")
	}
	return nil
}

// sequence makes choice index of a request whose prompt is tokens. forced is
// the answer when the client leaves no choice, else nil.
func (s *Server) sequence(p params, tokens []uint32, index int, forced []byte) (*sequence, error) {
	room := s.cfg.MaxModelLen - len(tokens)
	if room < 1 {
		return nil, tooLong(s.cfg.MaxModelLen)
	}
	limit := room
	if p.maxTokens > 0 {
		limit = min(limit, p.maxTokens)
	}
	seed := promptSeed(tokens, p.salt) + uint64(index)
	q := &sequence{index: index, model: p.model, natural: stopped}
	switch {
	case forced != nil:
		q.text = forced
	case p.ignoreEOS:
		q.text = answerText(seed, limit*bytesPerToken)
	default:
		q.text = answerText(seed, min(limit, max(answerLength(seed), p.minTokens))*bytesPerToken)
	}
	answer := append(cut(q.text, nil), tokenTurnEnd)
	if len(answer) > limit {
		answer, q.natural = answer[:limit], length
		q.text = q.text[:min(len(q.text), limit*bytesPerToken)]
	}
	base := xxh3.HashString(p.model + "\x00" + p.salt)
	q.Request = engine.Request{
		Prompt: len(tokens), Answer: len(answer),
		Blocks: chain(append(tokens[:len(tokens):len(tokens)], answer...), s.cfg.Engine.BlockSize, base),
	}
	return q, nil
}

// promptSeed makes the answer to a prompt the same each time.
func promptSeed(tokens []uint32, salt string) uint64 {
	seed := xxh3.HashString(salt)
	if len(tokens) > 0 {
		seed = uint64(chain(tokens, len(tokens), seed)[0])
	}
	return seed
}

// between is the text of the answer between two numbers of tokens.
func (q *sequence) between(from, to int) string {
	end := len(q.text)
	return string(q.text[min(from*bytesPerToken, end):min(to*bytesPerToken, end)])
}

// format writes one endpoint's kind of answer.
type format interface {
	// begin appends what a stream starts with before the engine's first output.
	begin(b []byte) []byte
	// open appends what comes with the first output of any choice.
	open(b []byte) []byte
	// piece appends tokens from up to to of q, and its end unless why is running.
	piece(b []byte, q *sequence, from, to int, why reason) []byte
	// close appends what comes after the last choice has ended.
	close(b []byte) []byte
	// fail appends what a stream ends with when the engine dies; nothing when it is cut.
	fail(b []byte) []byte
	// whole is the answer of a request that does not stream.
	whole() []byte
}

// generate runs sequences to their ends and writes what they yield.
func (s *Server) generate(w http.ResponseWriter, r *http.Request, stream bool, sequences []*sequence, f format) {
	wake := make(chan struct{}, 1)
	for _, q := range sequences {
		q.wake = wake
	}
	if err := s.submit(sequences); err != nil {
		writeError(w, err)
		return
	}
	defer s.abandon(sequences) // nothing is left of them unless the client leaves
	if s.resetAtWork(w, r) {
		return
	}
	if stream {
		// vLLM sends status and headers before the engine has looked at the prompt.
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		_, _ = w.Write(f.begin(nil))
		_ = http.NewResponseController(w).Flush()
	}
	s.held(r)
	if stream {
		s.stream(w, r, wake, sequences, f)
		return
	}
	for open := len(sequences); open > 0; {
		select {
		case <-wake:
		case <-r.Context().Done():
			panic(http.ErrAbortHandler) // returning would end the answer well
		}
		open = 0
		for _, q := range sequences {
			switch _, why := q.load(); why {
			case running:
				open++
			case failed:
				writeError(w, errEngineDead)
				return
			case killed:
				reset(w)
				return
			}
		}
	}
	if _, ok := s.faults.hit(true, Die); ok {
		panic(http.ErrAbortHandler)
	}
	writeJSON(w, http.StatusOK, f.whole())
}

// held waits as long as a fault wants the first output held back.
func (s *Server) held(r *http.Request) {
	if f, ok := s.faults.hit(true, Hold); ok {
		waitFor(r, f.Delay)
	}
}

// resetAtWork resets the connection after a while, if a fault wants that.
func (s *Server) resetAtWork(w http.ResponseWriter, r *http.Request) bool {
	f, ok := s.faults.hit(true, ResetAtWork)
	if ok {
		waitFor(r, f.Delay)
		reset(w)
	}
	return ok
}

// waitFor waits for so many seconds, or ends the request if its client leaves before.
func waitFor(r *http.Request, delay float64) {
	select {
	case <-time.After(seconds(delay)):
	case <-r.Context().Done():
		panic(http.ErrAbortHandler)
	}
}

// stream writes each token as soon as its step has ended. Like vLLM it joins
// those that pile up while the client or this goroutine is slow.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, wake <-chan struct{}, sequences []*sequence, f format) {
	out := http.NewResponseController(w)
	dying, dies := s.faults.hit(true, Die)
	sent := make([]int, len(sequences))
	finished := make([]bool, len(sequences))
	var b []byte
	opened, chunks := false, 0
	for open := len(sequences); open > 0; {
		select {
		case <-wake:
		case <-r.Context().Done():
			panic(http.ErrAbortHandler) // returning would end the answer well
		}
		b = b[:0]
		for i, q := range sequences {
			tokens, why := q.load()
			if why == killed {
				reset(w)
				return
			}
			if why == failed {
				if b = f.fail(b[:0]); len(b) == 0 {
					panic(http.ErrAbortHandler)
				}
				_, _ = w.Write(b)
				return
			}
			if finished[i] || tokens == sent[i] && why == running {
				continue
			}
			if !opened {
				b, opened = f.open(b), true
			}
			if why == aborted && tokens == 0 { // such a choice has no finish_reason
				finished[i] = true
				open--
				continue
			}
			// Tokens that were joined may leave fewer chunks than that; the end
			// of the answer is not for a client of a replica that dies.
			if dies && (chunks >= dying.Chunks || why != running) {
				_, _ = w.Write(b)
				_ = out.Flush()
				panic(http.ErrAbortHandler)
			}
			b = f.piece(b, q, sent[i], tokens, why)
			chunks++
			sent[i] = tokens
			if why != running {
				finished[i] = true
				open--
			}
		}
		if open == 0 {
			b = f.close(b)
		}
		if _, err := w.Write(b); err != nil {
			return
		}
		if err := out.Flush(); err != nil {
			return
		}
	}
}

// id is the part of an answer's id that tells it from others.
func id(r *http.Request) string {
	if given := r.Header.Get("X-Request-Id"); given != "" {
		return given
	}
	return randomID()
}

func randomID() string {
	const digits = "0123456789abcdef"
	b := make([]byte, 16)
	for i, v := 0, rand.Uint64(); i < len(b); i, v = i+1, v>>4 {
		b[i] = digits[v&15]
	}
	return string(b)
}
