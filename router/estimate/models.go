package estimate

import "warmroute/prompt"

// maxModels is how many models have estimates of their own.
const maxModels = 1024

// modelEstimates is what was learned of the requests for one model.
type modelEstimates struct {
	ratios   [prompt.TextClasses]tokenRatio
	media    mediaTokens
	uncached Average // tokens that a request had to compute
}

func newModelEstimates() *modelEstimates {
	e := &modelEstimates{media: newMediaTokens()}
	for class := range e.ratios {
		e.ratios[class] = newTokenRatio()
	}
	return e
}

// models holds the estimates by model, and those of all models together, which count for
// a model of which nothing is known yet.
type models struct {
	all    *modelEstimates
	byName map[string]*modelEstimates
}

func newModels() models {
	return models{all: newModelEstimates(), byName: map[string]*modelEstimates{}}
}

// find returns the estimates of a model, or of all models for an unknown one.
func (m *models) find(name string) *modelEstimates {
	if e := m.byName[name]; e != nil {
		return e
	}
	return m.all
}

// ensure returns the estimates of a model, new ones if it has none; nil if there are too many.
func (m *models) ensure(name string) *modelEstimates {
	e := m.byName[name]
	if e == nil && len(m.byName) < maxModels {
		e = newModelEstimates()
		m.byName[name] = e
	}
	return e
}

// ratio returns the ratio of a model's prompts of a class, or that of all models if it has none.
func (m *models) ratio(name string, class prompt.TextClass) *tokenRatio {
	if q := &m.find(name).ratios[class]; q.isLearned() {
		return q
	}
	return &m.all.ratios[class]
}

func (m *models) addPrompt(name string, class prompt.TextClass, bytes, tokens int) {
	m.all.ratios[class].addPrompt(bytes, tokens)
	if e := m.ensure(name); e != nil {
		e.ratios[class].addPrompt(bytes, tokens)
	}
}

// addMedia learns from a prompt with media.
func (m *models) addMedia(name string, class prompt.TextClass, counts *prompt.MediaCounts, bytes, tokens int) {
	e := m.ensure(name)
	if e == nil {
		e = m.all
	}
	kind, each, ok := e.media.tokensPerMediaItem(m.ratio(name, class).bytesPerToken(), e.ratios[class].assumedError(), counts, bytes, tokens)
	if !ok {
		return
	}
	m.all.media.add(kind, each)
	if e != m.all {
		e.media.add(kind, each)
	}
}

// tokenSizes returns the token sizes of a model's prompts of a class.
func (m *models) tokenSizes(name string, class prompt.TextClass) TokenSizes {
	e := m.find(name)
	s := TokenSizes{BytesPerToken: m.ratio(name, class).bytesPerToken()}
	for k := range s.MediaTokens {
		if s.MediaTokens[k] = e.media[k].Value; e.media.samples(prompt.MediaKind(k)) == 0 {
			s.MediaTokens[k] = m.all.media[k].Value
		}
	}
	return s
}

func (m *models) addUncached(name string, tokens float64) {
	m.all.uncached.Add(tokens)
	if e := m.ensure(name); e != nil {
		e.uncached.Add(tokens)
	}
}

// meanUncached returns the mean of the uncached tokens of a model's requests; 0 before the first of any model.
func (m *models) meanUncached(name string) float64 {
	if e := m.find(name); e.uncached.count > 0 {
		return e.uncached.Value
	}
	return m.all.uncached.Value
}
