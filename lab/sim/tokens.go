package sim

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"
)

// generateTokens handles POST /inference/v1/generate: token ids in, token ids out.
func (s *Server) generateTokens(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err != nil {
		writeError(w, err)
		return
	}
	p, tokens, err := s.readTokenParams(in)
	if err != nil {
		s.refuse(w, r, in, err)
		return
	}
	p.session = sessionID(r, gjson.Result{}, gjson.Result{})
	f := &tokensFormat{server: s, params: p, id: "generate-tokens-" + requestID(r), created: time.Now().Unix()}
	for range p.n {
		q, err := s.newSequence(p, tokens, len(f.sequences), nil)
		if err != nil {
			s.refuse(w, r, in, err)
			return
		}
		f.sequences = append(f.sequences, q)
	}
	s.generate(w, r, p.stream, f.sequences, f)
}

// readTokenParams reads and checks a request of generateTokens. Its sampling parameters
// are an object of their own.
func (s *Server) readTokenParams(in fields) (params, []uint32, error) {
	if err := in.validateTypes("token_ids", "sampling_params"); err != nil {
		return params{}, nil, err
	}
	ids, sampling := in["token_ids"], in["sampling_params"]
	switch {
	case !ids.IsArray():
		return params{}, nil, validationError("body.token_ids", "Input should be a valid list")
	case !ids.Get("0").Exists():
		return params{}, nil, validationError("body.token_ids", "List should have at least 1 item after validation, not 0")
	case !sampling.IsObject():
		return params{}, nil, validationError("body.sampling_params", "Input should be an object or an instance of SamplingParams")
	}
	merged := make(fields)
	sampling.ForEach(func(key, value gjson.Result) bool {
		merged[key.Str] = value
		return true
	})
	for _, key := range [...]string{"model", "cache_salt", "stream", "kv_transfer_params"} {
		merged[key] = in[key]
	}
	if in["stream"].Bool() { // else vLLM ignores the options here
		merged["stream_options"] = in["stream_options"]
	}
	if err := merged.validateTypes(); err != nil {
		return params{}, nil, err
	}
	p, err := s.readParams(merged, "max_tokens")
	if most := s.cfg.Engine.MaxSeqs; err == nil && p.n > most {
		err = badRequest("", fmt.Sprintf("sampling_params.n must be at most the server's max_num_seqs (%d), got %d.", most, p.n))
	}
	return p, tokenIDs(ids), err
}

// respondTokensDisabled responds as vLLM does without --enable-scale-out.
func respondTokensDisabled(w http.ResponseWriter, _ *http.Request) {
	writeError(w, apiError{status: http.StatusForbidden, kind: "PermissionDeniedError",
		message: "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."})
}

// tokensFormat writes the responses of /inference/v1/generate.
type tokensFormat struct {
	params
	server    *Server
	id        string
	created   int64
	sequences []*sequence
}

func (f *tokensFormat) appendBeforePrefill(b []byte) (unchanged []byte) { return b }

func (f *tokensFormat) appendBeforeFirstToken(b []byte) (unchanged []byte) { return b }

func (f *tokensFormat) appendTokens(b []byte, q *sequence, fromToken, toToken int, end endReason) []byte {
	b = appendQuoted(append(b, `data: {"request_id":`...), f.id)
	b = append(b, `,"usage":`...)
	if f.continuousUsage {
		b = f.server.appendUsage(b, usage{prompt: q.Prompt, completion: toToken}, usageRunning)
	} else {
		b = append(b, "null"...)
	}
	b = f.appendChoice(append(b, `,"output_mode":"tokens","choices":[`...), q, fromToken, toToken, end)
	return append(b, "]}\n\n"...)
}

// appendChoice appends a choice with the tokens fromToken up to toToken of q.
func (f *tokensFormat) appendChoice(b []byte, q *sequence, fromToken, toToken int, end endReason) []byte {
	b = strconv.AppendInt(append(b, `{"index":`...), int64(q.index), 10)
	if end == running {
		b = append(b, `,"finish_reason":null`...)
	} else {
		b = append(b, `,"finish_reason":"`+end.String()+`"`...)
	}
	b = append(b, `,"stop_reason":null,"token_ids":[`...)
	for i, id := range q.tokensBetween(fromToken, toToken) {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(id), 10)
	}
	b = append(b, `],"routed_experts":null,"sampling_mask":null,"weight_versions":`...)
	if end == running {
		b = append(b, "null"...)
	} else {
		b = strconv.AppendInt(append(b, `[{"version":"default","start":0,"end":`...), int64(toToken), 10)
		b = append(b, "}]"...)
	}
	return append(b, `,"logprobs":null}`...)
}

func (f *tokensFormat) appendStreamEnd(b []byte) []byte {
	if f.includeUsage {
		b = appendQuoted(append(b, `data: {"request_id":`...), f.id)
		b = f.server.appendUsage(append(b, `,"usage":`...), sumUsage(f.sequences, f.n), usageCompletionStream)
		b = append(b, `,"output_mode":"tokens","choices":[]}`+"\n\n"...)
	}
	return append(b, "data: [DONE]\n\n"...)
}

func (f *tokensFormat) appendFailure(b []byte, e apiError) []byte {
	return appendErrorEvent(b, e)
}

func (f *tokensFormat) fullResponse() []byte {
	b := appendQuoted([]byte(`{"request_id":`), f.id)
	b = appendQuoted(append(b, `,"model":`...), f.model)
	b = strconv.AppendInt(append(b, `,"created":`...), f.created, 10)
	b = f.server.appendUsage(append(b, `,"usage":`...), sumUsage(f.sequences, f.n), usageCompletion)
	b = append(b, `,"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":null,"mm_placeholders":null,"metrics":null,`+
		`"kv_transfer_params":`+f.server.formatTransferParams(f.sequences)+`,"ec_transfer_params":null,"output_mode":"tokens","choices":[`...)
	for i, q := range f.sequences {
		if i > 0 {
			b = append(b, ',')
		}
		tokens, end := q.loadProgress()
		b = f.appendChoice(b, q, 0, tokens, end)
	}
	return append(b, "]}"...)
}

// tokensBetween returns the output's tokens between two numbers of them. The one after the
// text ends the turn.
func (q *sequence) tokensBetween(fromToken, toToken int) []uint32 {
	tokens := tokenizer(q.bytesPerToken).split(q.text[q.textEnd(fromToken):q.textEnd(toToken)], nil)
	if len(tokens) < toToken-fromToken {
		tokens = append(tokens, tokenTurnEnd)
	}
	return tokens
}
