package estimate

import (
	"sort"

	"warmroute/prompt"
)

const (
	defaultBytesPerToken = 4 // of English text
	priorTokens          = 1000
	maxRatioTokens       = 1 << 20 // above which older prompts count half
	minProvenTokens      = 16_000  // from which a ratio is evidence of how long a prompt is

	// minBytesPerToken and maxBytesPerToken bound what a tokenizer can make of a text.
	minBytesPerToken = 0.5
	maxBytesPerToken = 32
	minTextBytes     = 256 // of a prompt; in a shorter one the chat template's own tokens dominate

	// lengthMargin is how many times the bytes per token of its class a prompt has at most.
	lengthMargin = 1.5
	// tokensMargin is how many times the estimated tokens a prompt rarely exceeds, unprovenTokensMargin the same before
	// there is evidence. Such a prompt may be refused by a replica, and is sent to another one then.
	tokensMargin         = 1.25
	unprovenTokensMargin = 2
)

// tokenRatio is how many bytes of text make a token.
type tokenRatio struct{ bytes, tokens float64 }

func newTokenRatio() tokenRatio {
	return tokenRatio{defaultBytesPerToken * priorTokens, priorTokens}
}

// bytesPerToken returns the ratio.
func (q *tokenRatio) bytesPerToken() float64 { return q.bytes / q.tokens }

// isLearned reports whether the ratio is of any prompt.
func (q *tokenRatio) isLearned() bool { return q.tokens > priorTokens }

// assumedError returns by which share of them the tokens of a text may differ from what the ratio tells.
func (q *tokenRatio) assumedError() float64 {
	if q.tokens < minKnownRatioTokens {
		return defaultRatioError
	}
	return ratioError
}

// addPrompt learns from a prompt, unless it is short.
func (q *tokenRatio) addPrompt(bytes, tokens int) {
	if bytes < minTextBytes {
		return
	}
	q.bytes += float64(bytes)
	q.tokens += float64(tokens)
	if q.tokens > maxRatioTokens {
		q.bytes, q.tokens = q.bytes/2, q.tokens/2
	}
}

// isPlausibleRatio reports whether a tokenizer can make so many tokens of so many bytes.
func isPlausibleRatio(bytes, tokens int) bool {
	q := float64(bytes) / float64(tokens)
	return bytes < minTextBytes || q >= minBytesPerToken && q <= maxBytesPerToken
}

const (
	defaultMediaTokens = 1000 // of a media item, as an image has in most models
	minMediaTokens     = 1
	maxMediaTokens     = 1 << 17
	maxMediaGrowth     = 8 // times the estimate; a sample counts no more

	// knownMediaSamples is how many samples make an estimate good enough to tell that a prompt is too long.
	knownMediaSamples = 8
	// maxMediaError is the share of the tokens of media by which those of the text may be off in a
	// prompt that is learned from. Of its own tokens they are off by ratioError, or by
	// defaultRatioError while the ratio is not known.
	maxMediaError       = 0.5
	ratioError          = 0.1
	defaultRatioError   = 0.25
	minKnownRatioTokens = 4 * priorTokens // from which on a ratio is known
)

// TokenSizes is how many bytes of text make a token of a model, and how many tokens its media items have.
type TokenSizes struct {
	BytesPerToken float64
	MediaTokens   [prompt.NumMediaKinds]float64
}

// CountTokens returns about how many tokens there are in the first bytes of a prompt with these media items.
func (s *TokenSizes) CountTokens(bytes int, media []prompt.MediaPosition) float64 {
	begun := sort.Search(len(media), func(i int) bool { return media[i].Offset >= bytes })
	if begun == 0 {
		return float64(bytes) / s.BytesPerToken
	}
	last := &media[begun-1]
	covered := min(prompt.MediaBytes, bytes-last.Offset) // of the last item
	tokens := float64(bytes-(begun-1)*prompt.MediaBytes-covered) / s.BytesPerToken
	tokens += s.CountMediaTokens(&last.Counts)
	return tokens - s.MediaTokens[last.Kind]*float64(prompt.MediaBytes-covered)/prompt.MediaBytes
}

// CountMediaTokens returns about how many tokens so many media items have.
func (s *TokenSizes) CountMediaTokens(counts *prompt.MediaCounts) (tokens float64) {
	for kind, n := range counts {
		tokens += float64(n) * s.MediaTokens[kind]
	}
	return tokens
}

// mediaTokens is how many tokens a media item of each kind has.
type mediaTokens [prompt.NumMediaKinds]Average

func newMediaTokens() (m mediaTokens) {
	for kind := range m {
		m[kind] = NewAverage(defaultMediaTokens, 1)
	}
	return m
}

// samples returns from how many prompts the estimate of a kind was learned.
func (m *mediaTokens) samples(kind prompt.MediaKind) float64 { return m[kind].count - 1 }

// tokensPerMediaItem returns how many tokens each media item of a prompt has, and of which kind they are, given the bytes
// per token of its text and their relative error. It returns false if the items are of several kinds, if the
// prompt has too much text to tell, or if the replica cannot have counted right.
func (m *mediaTokens) tokensPerMediaItem(bytesPerToken, relativeError float64, counts *prompt.MediaCounts, bytes, tokens int) (
	kind prompt.MediaKind, each float64, ok bool) {
	items := 0
	for k, n := range counts {
		switch {
		case n == 0:
			continue
		case items > 0:
			return 0, 0, false
		}
		kind, items = prompt.MediaKind(k), int(n)
	}
	text := float64(bytes-items*prompt.MediaBytes) / bytesPerToken
	rest, textError := float64(tokens)-text, relativeError*text
	each = max(minMediaTokens, rest/float64(items))
	ok = items > 0 && rest >= -textError && each <= maxMediaTokens && textError <= maxMediaError*max(rest, m[kind].Value*float64(items))
	return kind, each, ok
}

// add adds a sample.
func (m *mediaTokens) add(kind prompt.MediaKind, each float64) {
	m[kind].Add(min(each, maxMediaGrowth*m[kind].Value))
}
