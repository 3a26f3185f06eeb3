package sim

import (
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"
)

func (s *Server) completions(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err != nil {
		writeError(w, err)
		return
	}
	if err := checkPrompt(in); err != nil {
		s.refuse(w, r, in, err)
		return
	}
	p, err := s.readParams(in, "max_tokens")
	if err != nil {
		s.refuse(w, r, in, err)
		return
	}
	if !in.has("max_tokens") {
		p.maxTokens = 16 // OpenAI's default, which vLLM keeps for this endpoint
	}
	p.session = sessionID(r, in["session_id"], in["vllm_xargs"])
	f := &completionFormat{server: s, params: p, id: "cmpl-" + requestID(r), created: time.Now().Unix()}
	for _, prompt := range s.tokenizePrompts(in["prompt"]) {
		if in["echo"].Bool() {
			f.echo = append(f.echo, detokenize(prompt))
		}
		for range p.n {
			q, err := s.newSequence(p, prompt, len(f.sequences), nil)
			if err != nil {
				s.refuse(w, r, in, err)
				return
			}
			f.sequences = append(f.sequences, q)
		}
	}
	s.generate(w, r, p.stream, f.sequences, f)
}

func checkPrompt(in fields) error {
	if err := in.validateTypes(); err != nil {
		return err
	}
	v := in["prompt"]
	if in.has("prompt") && v.Type != gjson.String && !v.IsArray() {
		return validationError("body.prompt", "Input should be a valid list or string")
	}
	if !in.has("prompt") || v.IsArray() && !v.Get("0").Exists() {
		return badParam("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	}
	return nil
}

// tokenizePrompts returns the prompts in a text, a list of token ids, or a list of either.
func (s *Server) tokenizePrompts(prompt gjson.Result) [][]uint32 {
	if prompt.Type == gjson.String {
		return [][]uint32{s.tokenizer().tokenize([]byte(prompt.Str), nil)}
	}
	if prompt.Get("0").Type == gjson.Number {
		return [][]uint32{tokenIDs(prompt)}
	}
	var all [][]uint32
	for _, one := range prompt.Array() {
		if one.IsArray() {
			all = append(all, tokenIDs(one))
		} else {
			all = append(all, s.tokenizer().tokenize([]byte(one.String()), nil))
		}
	}
	return all
}

func tokenIDs(list gjson.Result) []uint32 {
	var ids []uint32
	list.ForEach(func(_, id gjson.Result) bool {
		ids = append(ids, uint32(id.Uint()))
		return true
	})
	return ids
}

// completionFormat writes text_completion objects.
type completionFormat struct {
	params
	server    *Server
	id        string
	created   int64
	echo      []string // the prompts, if requested
	sequences []*sequence

	head []byte // of every chunk
}

func (f *completionFormat) appendChunkHead(b []byte) []byte {
	if f.head == nil {
		f.head = f.appendObjectHead([]byte("data: "))
	}
	return append(b, f.head...)
}

func (f *completionFormat) appendObjectHead(b []byte) []byte {
	b = appendQuoted(append(b, `{"id":`...), f.id)
	b = append(b, `,"object":"text_completion","created":`...)
	b = strconv.AppendInt(b, f.created, 10)
	b = appendQuoted(append(b, `,"model":`...), f.model)
	return append(b, `,"choices":[`...)
}

func (f *completionFormat) appendBeforePrefill(b []byte) (unchanged []byte) { return b }

// appendBeforeFirstToken appends nothing: a completion's stream begins with its text.
func (f *completionFormat) appendBeforeFirstToken(b []byte) (unchanged []byte) { return b }

func (f *completionFormat) appendTokens(b []byte, q *sequence, fromToken, toToken int, end endReason) []byte {
	text := q.textBetween(fromToken, toToken)
	if fromToken == 0 {
		text = f.echoedPrompt(q) + text
	}
	b = append(f.appendChunkHead(b), `{"index":`...)
	b = strconv.AppendInt(b, int64(q.index), 10)
	b = appendQuoted(append(b, `,"text":`...), text)
	b = append(appendFinishReason(b, end), `,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]`...)
	if end != running && !f.includeUsage {
		b = append(b, `,"system_fingerprint":`+f.server.fingerprint()...)
	}
	if f.continuousUsage {
		b = f.server.appendUsage(append(b, `,"usage":`...), usage{prompt: q.Prompt, completion: toToken}, usageRunning)
	}
	return append(b, "}\n\n"...)
}

func (f *completionFormat) echoedPrompt(q *sequence) string {
	if f.echo == nil {
		return ""
	}
	return f.echo[q.index/f.n]
}

func appendFinishReason(b []byte, end endReason) []byte {
	if end == running {
		return append(b, `,"logprobs":null,"finish_reason":null`...)
	}
	return append(b, `,"logprobs":null,"finish_reason":"`+end.String()+`"`...)
}

func (f *completionFormat) appendStreamEnd(b []byte) []byte {
	if f.includeUsage {
		b = append(f.appendChunkHead(b), `],"usage":`...)
		b = f.server.appendUsage(b, sumUsage(f.sequences, f.n), usageCompletionStream)
		b = append(b, `,"system_fingerprint":`+f.server.fingerprint()+"}\n\n"...)
	}
	return append(b, "data: [DONE]\n\n"...)
}

func (f *completionFormat) appendFailure(b []byte, e apiError) []byte {
	return appendErrorEvent(b, e)
}

func (f *completionFormat) fullResponse() []byte {
	b := f.appendObjectHead(nil)
	for i, q := range f.sequences {
		if i > 0 {
			b = append(b, ',')
		}
		tokens, end := q.loadProgress()
		b = append(b, `{"index":`...)
		b = strconv.AppendInt(b, int64(q.index), 10)
		b = appendQuoted(append(b, `,"text":`...), f.echoedPrompt(q)+q.textBetween(0, tokens))
		b = append(appendFinishReason(b, end),
			`,"stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`+f.server.fingerprint()+`,"usage":`...)
	b = f.server.appendUsage(b, sumUsage(f.sequences, f.n), usageCompletion)
	return append(b, `,"kv_transfer_params":`+f.server.formatTransferParams(f.sequences)+`,"ec_transfer_params":null,"metrics":null}`...)
}

// dimensions of the vectors of embeddings.
const dimensions = 8

// embedWithoutEngine handles POST /v1/embeddings, with vectors that depend
// on the input alone.
func (s *Server) embedWithoutEngine(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil {
		err = in.validateTypes("input")
	}
	var model string
	if err == nil {
		model, err = s.modelOrDefault(in["model"].Str)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	b := []byte(`{"id":"embd-` + requestID(r) + `","object":"list","created":` + strconv.FormatInt(s.processStartTime().Unix(), 10) +
		`,"model":`)
	b = append(appendQuoted(b, model), `,"data":[`...)
	total := 0
	for i, tokens := range s.tokenizePrompts(in["input"]) {
		total += len(tokens)
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"index":`+strconv.Itoa(i)+`,"object":"embedding","embedding":[`...)
		random := rand.New(rand.NewPCG(uint64(len(tokens)), outputSeed(tokens, "")))
		for d := range dimensions {
			if d > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendFloat(b, random.NormFloat64(), 'g', 6, 64)
		}
		b = append(b, "]}"...)
	}
	n := strconv.Itoa(total)
	writeJSON(w, http.StatusOK, append(b, `],"usage":{"prompt_tokens":`+n+`,"total_tokens":`+n+`,"completion_tokens":0,`+
		`"prompt_tokens_details":null}}`...))
}
