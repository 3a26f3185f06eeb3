package sim

import (
	"math/rand/v2"
	"net/http"
	"strconv"
)

// dimensions of the vectors that embeddings returns.
const dimensions = 8

// embeddings answers POST /v1/embeddings at once, with vectors that depend on
// nothing but the input. The engine has no part in it.
func (s *Server) embeddings(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil && !in.has("input") {
		err = validation(in.missing("input"))
	}
	var model string
	if err == nil {
		model, err = s.resolve(in["model"].Str)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	b := []byte(`{"id":"embd-` + id(r) + `","object":"list","created":` + strconv.FormatInt(s.start().Unix(), 10) + `,"model":`)
	b = append(quote(b, model), `,"data":[`...)
	total := 0
	for i, tokens := range prompts(in["input"]) {
		total += len(tokens)
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"index":`+strconv.Itoa(i)+`,"object":"embedding","embedding":[`...)
		random := rand.New(rand.NewPCG(uint64(len(tokens)), promptSeed(tokens, "")))
		for d := range dimensions {
			if d > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendFloat(b, random.NormFloat64(), 'g', 6, 64)
		}
		b = append(b, "]}"...)
	}
	n := strconv.Itoa(total)
	writeJSON(w, http.StatusOK, append(b, `],"usage":{"prompt_tokens":`+n+`,"total_tokens":`+n+`,"completion_tokens":0,"prompt_tokens_details":null}}`...))
}
