package sim

import (
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
		writeError(w, err)
		return
	}
	p, err := s.readParams(in, "max_tokens")
	if err != nil {
		writeError(w, err)
		return
	}
	if !in.has("max_tokens") {
		p.maxTokens = 16 // OpenAI's default, which vLLM keeps for this endpoint
	}
	f := &completionFormat{server: s, params: p, id: "cmpl-" + id(r), created: time.Now().Unix()}
	for _, prompt := range prompts(in["prompt"]) {
		if in["echo"].Bool() {
			f.echo = append(f.echo, detokenize(prompt))
		}
		for range p.n {
			q, err := s.sequence(p, prompt, len(f.sequences), nil)
			if err != nil {
				writeError(w, err)
				return
			}
			f.sequences = append(f.sequences, q)
		}
	}
	s.generate(w, r, p.stream, f.sequences, f)
}

func checkPrompt(in fields) error {
	found := in.checkTypes()
	v := in["prompt"]
	if in.has("prompt") && v.Type != gjson.String && !v.IsArray() {
		// One complaint for each of the types that a prompt may have.
		list := invalid{kind: "list_type", at: "body.prompt", message: "Input should be a valid list", input: repr(v)}
		text := invalid{kind: "string_type", at: "body.prompt", message: "Input should be a valid string", input: repr(v)}
		found = append(found, list, list, text, list)
	}
	if len(found) > 0 {
		return validation(found...)
	}
	if !in.has("prompt") || v.IsArray() && !v.Get("0").Exists() {
		return badParam("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	}
	return nil
}

// prompts reads a text, a list of token ids, or a list of either.
func prompts(v gjson.Result) [][]uint32 {
	if v.Type == gjson.String {
		return [][]uint32{tokenize([]byte(v.Str), nil)}
	}
	if v.Get("0").Type == gjson.Number {
		return [][]uint32{tokenIDs(v)}
	}
	var all [][]uint32
	for _, one := range v.Array() {
		if one.IsArray() {
			all = append(all, tokenIDs(one))
		} else {
			all = append(all, tokenize([]byte(one.String()), nil))
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
	echo      []string // the prompts, when the client wants them back
	sequences []*sequence

	head []byte // what every chunk starts with, made once
}

func (f *completionFormat) chunk(b []byte) []byte {
	if f.head == nil {
		f.head = f.start([]byte("data: "))
	}
	return append(b, f.head...)
}

func (f *completionFormat) start(b []byte) []byte {
	b = quote(append(b, `{"id":`...), f.id)
	b = append(b, `,"object":"text_completion","created":`...)
	b = strconv.AppendInt(b, f.created, 10)
	b = quote(append(b, `,"model":`...), f.model)
	return append(b, `,"choices":[`...)
}

func (f *completionFormat) begin(b []byte) []byte { return b }

// open appends nothing: a completion's stream has no chunk before its text.
func (f *completionFormat) open(b []byte) []byte { return b }

func (f *completionFormat) piece(b []byte, q *sequence, from, to int, why reason) []byte {
	text := q.between(from, to)
	if from == 0 {
		text = f.prompt(q) + text
	}
	b = append(f.chunk(b), `{"index":`...)
	b = strconv.AppendInt(b, int64(q.index), 10)
	b = quote(append(b, `,"text":`...), text)
	b = append(appendFinish(b, why), `,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]`...)
	if why != running && !f.includeUsage {
		b = append(b, `,"system_fingerprint":`+fingerprint...)
	}
	if f.continuousUsage {
		b = f.server.appendUsage(append(b, `,"usage":`...), usage{prompt: q.Prompt, completion: to}, usageRunning)
	}
	return append(b, "}\n\n"...)
}

func (f *completionFormat) prompt(q *sequence) string {
	if f.echo == nil {
		return ""
	}
	return f.echo[q.index/f.n]
}

func appendFinish(b []byte, why reason) []byte {
	if why == running {
		return append(b, `,"logprobs":null,"finish_reason":null`...)
	}
	return append(b, `,"logprobs":null,"finish_reason":"`+why.String()+`"`...)
}

func (f *completionFormat) close(b []byte) []byte {
	if f.includeUsage {
		b = append(f.chunk(b), `],"usage":`...)
		b = f.server.appendUsage(b, count(f.sequences, f.n), usageCompletionStream)
		b = append(b, `,"system_fingerprint":`+fingerprint+"}\n\n"...)
	}
	return append(b, "data: [DONE]\n\n"...)
}

func (f *completionFormat) fail(b []byte) []byte { return append(b, engineDeadEvent...) }

func (f *completionFormat) whole() []byte {
	b := f.start(nil)
	for i, q := range f.sequences {
		if i > 0 {
			b = append(b, ',')
		}
		tokens, why := q.load()
		b = append(b, `{"index":`...)
		b = strconv.AppendInt(b, int64(q.index), 10)
		b = quote(append(b, `,"text":`...), f.prompt(q)+q.between(0, tokens))
		b = append(appendFinish(b, why), `,"stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`+fingerprint+`,"usage":`...)
	b = f.server.appendUsage(b, count(f.sequences, f.n), usageCompletion)
	return append(b, `,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`...)
}
