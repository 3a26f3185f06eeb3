package sim

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"

	"warmroute/lab/sim/engine"
)

// params are the parameters that the endpoints which generate text share.
type params struct {
	model   string // as named in the response
	salt    string
	session string // see sessionID
	n       int

	priority int // in the engine's queue, as the body has it

	transfer transferParams

	maxTokens, minTokens int // 0: not set
	ignoreEOS            bool

	stream, includeUsage, continuousUsage bool
}

// readParams reads and checks the shared fields. limits are the fields that bound the
// output; the first one present counts.
func (s *Server) readParams(in fields, maxTokensKeys ...string) (params, error) {
	p := params{salt: in["cache_salt"].Str, n: 1, priority: int(in["priority"].Int()), ignoreEOS: in["ignore_eos"].Bool(),
		stream: in["stream"].Bool()}
	if o := in["stream_options"]; o.IsObject() {
		if !p.stream {
			return p, badParam("stream_options", "Stream options can only be defined when `stream=True`.")
		}
		p.includeUsage = o.Get("include_usage").Bool()
		p.continuousUsage = p.includeUsage && o.Get("continuous_usage_stats").Bool()
	}
	var err error
	if p.model, err = s.modelOrDefault(in["model"].Str); err != nil {
		return p, err
	}
	if p.transfer, err = parseTransferParams(in["kv_transfer_params"]); err != nil {
		return p, err
	}
	p.minTokens = int(in["min_tokens"].Int())
	for _, key := range maxTokensKeys {
		if !in.has(key) {
			continue
		}
		p.maxTokens = int(in[key].Int())
		if p.maxTokens < 1 {
			return p, badRequest("max_tokens", "max_tokens must be at least 1, got "+strconv.Itoa(p.maxTokens)+
				". (parameter=max_tokens, value="+strconv.Itoa(p.maxTokens)+")")
		}
		if p.maxTokens > s.cfg.MaxModelLen {
			return p, outputTooLong(key, p.maxTokens, s.cfg.MaxModelLen)
		}
		break
	}
	if p.maxTokens > 0 && p.minTokens > p.maxTokens {
		return p, badRequest("", fmt.Sprintf("min_tokens must be less than or equal to max_tokens=%d, got %d.", p.maxTokens, p.minTokens))
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

// newSequence returns one choice of a request with the prompt tokens. Its output is out, or
// generated if that is nil.
func (s *Server) newSequence(p params, tokens []uint32, choice int, out *output) (*sequence, error) {
	room := s.cfg.MaxModelLen - len(tokens)
	if room < 1 {
		return nil, promptTooLong(s.cfg.MaxModelLen)
	}
	limit := room
	if p.maxTokens > 0 {
		limit = min(limit, p.maxTokens)
	}
	seed := outputSeed(tokens, p.salt) + uint64(choice)
	bytes := s.cfg.BytesPerToken
	q := &sequence{bytesPerToken: bytes, index: choice, model: p.model, naturalEnd: stopped}
	switch {
	case out != nil:
		q.output = *out
	case p.ignoreEOS:
		q.text = generateText(seed, limit*bytes)
	default:
		q.text = generateText(seed, min(limit, max(drawOutputLength(seed), p.minTokens))*bytes)
	}
	output := append(s.tokenizer().split(q.text, nil), tokenTurnEnd)
	if len(output) > limit {
		output, q.naturalEnd = output[:limit], lengthLimit
		q.text = q.text[:min(len(q.text), limit*bytes)]
	}
	all := append(tokens[:len(tokens):len(tokens)], output...)
	base := xxh3.HashStringSeed(p.model+"\x00"+p.salt, s.blockHashSeed())
	q.Request = engine.Request{
		Prompt: len(tokens), Output: len(output), Priority: p.priority,
		Blocks: hashBlocks(all, s.cfg.Engine.BlockSize, base),
		Owner:  q,
	}
	q.transferParams = p.transfer
	if s.cfg.Connector.Enabled && (p.transfer.prefillRequest || p.transfer.decodeRequest) {
		q.promptHash = outputSeed(tokens, p.model+"\x00"+p.salt)
		q.PrefillRequest, q.transferID = p.transfer.prefillRequest, "cmpl-"+randomID()
		if p.transfer.decodeRequest {
			q.RemoteTokens, q.transferBegun = len(tokens), make(chan time.Duration, 1)
		}
	}
	if s.cfg.Engine.KVEvents {
		q.kvEvents = kvEventContext{tokens: all, adapter: s.adapters.find(p.model), salt: p.salt, session: p.session}
	}
	return q, nil
}

// blockHashSeed returns hashSeed.
func (s *Server) blockHashSeed() uint64 {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return s.hashSeed
}

// sessionID returns the session that a request belongs to: as its body says, else its header, else
// vllm_xargs of the body. Endpoints whose bodies lack one of the fields pass a missing one.
func sessionID(r *http.Request, inBody, xargs gjson.Result) string {
	fallback := ""
	if v := xargs.Get("session_id"); v.Type == gjson.String {
		fallback = v.Str
	}
	return cmp.Or(inBody.Str, r.Header.Get("X-Session-ID"), fallback)
}

// outputSeed returns the seed of a prompt's output, which is always the same.
func outputSeed(tokens []uint32, salt string) uint64 {
	seed := xxh3.HashString(salt)
	if len(tokens) > 0 {
		seed = uint64(hashBlocks(tokens, len(tokens), seed)[0])
	}
	return seed
}

// format writes the responses of one endpoint.
type format interface {
	// appendBeforePrefill appends what a stream starts with before the engine's first output.
	appendBeforePrefill(b []byte) []byte
	// appendBeforeFirstToken appends what comes with the first output of any choice.
	appendBeforeFirstToken(b []byte) []byte
	// appendTokens appends the tokens fromToken up to toToken of q, and its end unless end
	// is running.
	appendTokens(b []byte, q *sequence, fromToken, toToken int, end endReason) []byte
	// appendStreamEnd appends what follows the end of the last choice.
	appendStreamEnd(b []byte) []byte
	// appendFailure appends the end of a stream that fails; nothing if the connection is
	// closed.
	appendFailure(b []byte, e apiError) []byte
	// complete returns the response of a request that does not stream.
	fullResponse() []byte
}

// generate runs sequences to their ends and writes the response.
func (s *Server) generate(w http.ResponseWriter, r *http.Request, stream bool, sequences []*sequence, f format) {
	wake := make(chan struct{}, 1)
	for _, q := range sequences {
		q.wake = wake
		if n, err := strconv.Atoi(r.Header.Get("X-Vllm-Priority")); err == nil {
			q.Priority = n // whatever the body says
		}
	}
	if sequences[0].lacksRemoteBlocks(s.cfg.Engine.BlockSize) {
		s.FailAll()
		s.Restart()
		writeError(w, errEngineDead)
		return
	}
	pinned, err := s.pinnedRank(r)
	if err == nil {
		err = s.submitAll(sequences, pinned)
	}
	if err != nil {
		s.releaseRemote(r, &sequences[0].transferParams)
		if stream && errors.Is(err, errQueueFull) { // as where the check before the status line has let the request pass
			writeStreamHeader(w)
			writeStreamFailure(w, f.appendBeforePrefill(nil), f, errQueueFull)
			return
		}
		writeError(w, err)
		return
	}
	stopTransfers := s.startTransfers(r, sequences)
	defer stopTransfers()
	defer s.abortUnfinished(sequences) // no effect unless the client disconnected
	if s.sleepThenReset(w, r) {
		return
	}
	if stream {
		// vLLM sends status and headers before the engine gets the prompt.
		writeStreamHeader(w)
		_, _ = w.Write(f.appendBeforePrefill(nil))
		_ = http.NewResponseController(w).Flush()
	}
	s.sleepForHoldFault(r)
	if stream {
		s.writeStream(w, r, wake, sequences, f)
		return
	}
	for open := len(sequences); open > 0; {
		select {
		case <-wake:
		case <-r.Context().Done():
			panic(http.ErrAbortHandler) // returning would end the response properly
		}
		open = 0
		for _, q := range sequences {
			switch _, end := q.loadProgress(); end {
			case running:
				open++
			case engineFailed:
				writeError(w, errEngineDead)
				return
			case transferFailed:
				writeError(w, errTransferFailed)
				return
			case processKilled:
				resetConnection(w)
				return
			}
		}
	}
	if _, ok := s.faults.matchAndCount(true, Die); ok {
		panic(http.ErrAbortHandler)
	}
	writeJSON(w, http.StatusOK, f.fullResponse())
}

func writeStreamHeader(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.WriteHeader(http.StatusOK)
}

// writeStreamFailure writes what is left of a stream that fails: rest, and an error event if the format has one.
func writeStreamFailure(w http.ResponseWriter, rest []byte, f format, e apiError) {
	event := f.appendFailure(nil, e)
	if len(event) == 0 {
		panic(http.ErrAbortHandler)
	}
	_, _ = w.Write(append(rest, event...))
}

// sleepForHoldFault waits for the delay of the fault Hold, if it is active.
func (s *Server) sleepForHoldFault(r *http.Request) {
	if f, ok := s.faults.matchAndCount(true, Hold); ok {
		sleepOrAbort(r, f.Delay)
	}
}

// sleepThenReset resets the connection after a delay if the fault ResetAtWork is active,
// and reports whether it was.
func (s *Server) sleepThenReset(w http.ResponseWriter, r *http.Request) (applied bool) {
	f, ok := s.faults.matchAndCount(true, ResetAtWork)
	if ok {
		sleepOrAbort(r, f.Delay)
		resetConnection(w)
	}
	return ok
}

// sleepOrAbort sleeps, or panics with http.ErrAbortHandler when the client disconnects.
func sleepOrAbort(r *http.Request, delaySeconds float64) {
	select {
	case <-time.After(seconds(delaySeconds)):
	case <-r.Context().Done():
		panic(http.ErrAbortHandler)
	}
}

// writeStream writes each token when its step has ended. Like vLLM it merges those that
// accumulate while the client or this goroutine is slow.
func (s *Server) writeStream(w http.ResponseWriter, r *http.Request, wake <-chan struct{}, sequences []*sequence, f format) {
	out := http.NewResponseController(w)
	dying, dies := s.faults.matchAndCount(true, Die)
	sent := make([]int, len(sequences))
	finished := make([]bool, len(sequences))
	var b []byte
	opened, chunks := false, 0
	for open := len(sequences); open > 0; {
		select {
		case <-wake:
		case <-r.Context().Done():
			panic(http.ErrAbortHandler) // returning would end the response properly
		}
		b = b[:0]
		for i, q := range sequences {
			tokens, end := q.loadProgress()
			if end == processKilled {
				resetConnection(w)
				return
			}
			if end == engineFailed || end == transferFailed {
				b = b[:0]
				cause := errEngineDead
				if end == transferFailed {
					b, cause = f.appendBeforeFirstToken(b), errTransferFailed
				}
				writeStreamFailure(w, b, f, asAPIError(cause))
				return
			}
			if finished[i] || tokens == sent[i] && end == running {
				continue
			}
			if !opened {
				b, opened = f.appendBeforeFirstToken(b), true
			}
			if end == aborted && tokens == 0 { // such a choice has no finish_reason
				finished[i] = true
				open--
				continue
			}
			// Merged tokens make fewer chunks than that; the end of the output is never
			// sent.
			if dies && (chunks >= dying.Chunks || end != running) {
				_, _ = w.Write(b)
				_ = out.Flush()
				panic(http.ErrAbortHandler)
			}
			b = f.appendTokens(b, q, sent[i], tokens, end)
			chunks++
			sent[i] = tokens
			if end != running {
				finished[i] = true
				open--
			}
		}
		if open == 0 {
			b = f.appendStreamEnd(b)
		}
		if _, err := w.Write(b); err != nil {
			return
		}
		if err := out.Flush(); err != nil {
			return
		}
	}
}

// requestID returns the unique part of a response's id.
func requestID(r *http.Request) string {
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

// usageStyle is one of the forms in which vLLM 0.32 writes usage.
type usageStyle int

const (
	usageChat             usageStyle = iota // a complete chat
	usageChatStream                         // the last chunk of a chat stream
	usageRunning                            // every chunk, with continuous_usage_stats
	usageCompletion                         // a complete completion
	usageCompletionStream                   // the last chunk of a completion's stream
)

func (s *Server) appendUsage(b []byte, u usage, style usageStyle) []byte {
	b = append(b, `{"prompt_tokens":`...)
	b = strconv.AppendInt(b, int64(u.prompt), 10)
	b = append(b, `,"total_tokens":`...)
	b = strconv.AppendInt(b, int64(u.prompt+u.completion), 10)
	b = append(b, `,"completion_tokens":`...)
	b = strconv.AppendInt(b, int64(u.completion), 10)
	if style == usageRunning {
		return append(b, `,"completion_tokens_details":null}`...)
	}
	whole := style == usageChat || style == usageCompletion
	switch {
	case !s.cfg.NoTokenDetails:
		b = append(b, `,"prompt_tokens_details":{"cached_tokens":`...)
		b = strconv.AppendInt(b, int64(u.cached), 10)
		created := `,"created_cache_tokens":` + strconv.Itoa(u.created)
		b = append(b, [...]string{
			usageChat:             created + `,"multimodal_tokens":null}`,
			usageChatStream:       created + `}`,
			usageCompletion:       `,"created_cache_tokens":null,"multimodal_tokens":null}`,
			usageCompletionStream: `}`,
		}[style]...)
	case whole:
		b = append(b, `,"prompt_tokens_details":null`...)
	}
	if whole {
		b = append(b, `,"completion_tokens_details":null`...)
	}
	return append(b, '}')
}

// usage is the sum over the sequences of a request, with each prompt counted once.
type usage struct{ prompt, cached, created, completion int }

func sumUsage(sequences []*sequence, choicesPerPrompt int) usage {
	var u usage
	for i, q := range sequences {
		if i%choicesPerPrompt == 0 {
			u.prompt += q.Prompt
			u.cached += q.reportedCachedTokens()
			u.created += q.Created
		}
		n, _ := q.loadProgress()
		u.completion += n
	}
	return u
}

// words make up every output. They are ASCII, so that they need no escaping in JSON
// and a token never splits a character.
var words = [...]string{
	"the", "of", "and", "a", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his",
	"they", "at", "be", "this", "from", "have", "or", "one", "had", "by", "word", "but", "what", "some", "we", "can",
	"out", "other", "were", "all", "there", "when", "up", "use", "your", "how", "said", "each", "she", "which", "their", "time",
	"will", "way", "about", "many", "then", "them", "would", "write", "like", "these", "long", "make", "thing", "see", "him", "two",
	"has", "look", "more", "day", "could", "go", "come", "did", "my", "sound", "no", "most", "number", "who", "over", "know",
	"water", "than", "call", "first", "people", "may", "down", "side", "been", "now", "find", "any", "new", "work", "part", "take",
	"get", "place", "made", "live", "where", "after", "back", "little", "only", "round", "man", "year", "came", "show", "every", "good",
	"me", "give", "our", "under", "name", "very", "through", "just", "form", "much", "great", "think", "say", "help", "low", "line",
}

// generateText returns English-like text of exactly n bytes, the same for the same
// seed.
func generateText(seed uint64, bytes int) []byte {
	random := rand.New(rand.NewPCG(seed, 1))
	text := make([]byte, 0, bytes+16)
	for len(text) < bytes {
		word := words[random.IntN(len(words))]
		text = append(text, word...)
		if random.IntN(12) == 0 {
			text = append(text, '.')
		}
		text = append(text, ' ')
	}
	return text[:bytes]
}

// drawOutputLength returns the length in tokens of an output that the request does
// not bound: lognormal around 250, the same for the same seed.
func drawOutputLength(seed uint64) (tokens int) {
	random := rand.New(rand.NewPCG(seed, 2))
	return 1 + int(250*math.Exp(0.5*random.NormFloat64()))
}
