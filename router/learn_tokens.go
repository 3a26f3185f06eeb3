package router

const (
	bytesPerToken = 4 // of English text, until learned
	tokensPrior   = 1000
	tokensMemory  = 1 << 20 // after which what was seen before counts half
	mostModels    = 1024    // whose texts are kept apart

	// Beyond these a figure is no tokenizer's.
	leastBytesPerToken = 0.5
	mostBytesPerToken  = 32
	leastTextBytes     = 256 // of a prompt; in a shorter one the template's own tokens count for too much
)

// ratio is how many bytes of text make a token.
type ratio struct{ bytes, tokens float64 }

func newRatio() ratio { return ratio{bytesPerToken * tokensPrior, tokensPrior} }

func (q *ratio) value() float64 { return q.bytes / q.tokens }

func (q *ratio) learn(bytes, tokens int) {
	if bytes < leastTextBytes {
		return
	}
	q.bytes += float64(bytes)
	q.tokens += float64(tokens)
	if q.tokens > tokensMemory {
		q.bytes, q.tokens = q.bytes/2, q.tokens/2
	}
}

// texts are the ratios of all models.
type texts struct {
	all    ratio
	models map[string]*ratio
}

func newTexts() texts { return texts{all: newRatio(), models: map[string]*ratio{}} }

// bytesPerToken is that of a model's texts, or of all together for one that
// nothing is known of.
func (t *texts) bytesPerToken(model string) float64 {
	if q := t.models[model]; q != nil {
		return q.value()
	}
	return t.all.value()
}

// add takes in the length of one prompt.
func (t *texts) add(model string, bytes, tokens int) {
	t.all.learn(bytes, tokens)
	q := t.models[model]
	if q == nil {
		if len(t.models) >= mostModels {
			return
		}
		fresh := newRatio()
		q = &fresh
		t.models[model] = q
	}
	q.learn(bytes, tokens)
}

// credible says whether a tokenizer can have made so many tokens of a prompt.
func credible(bytes, tokens int) bool {
	q := float64(bytes) / float64(tokens)
	return bytes < leastTextBytes || q >= leastBytesPerToken && q <= mostBytesPerToken
}
