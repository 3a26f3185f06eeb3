package estimate

// maxModels is how many models have estimates of their own.
const maxModels = 1024

// modelEstimates is what was learned of the requests for one model.
type modelEstimates struct {
	ratio    tokenRatio
	uncached Average // tokens that a request had to compute
}

// models holds the estimates by model, and those of all models together, which count for
// a model of which nothing is known yet.
type models struct {
	all    modelEstimates
	byName map[string]*modelEstimates
}

func newModels() models {
	return models{all: modelEstimates{ratio: newTokenRatio()}, byName: map[string]*modelEstimates{}}
}

// find returns the estimates of a model, or of all models for an unknown one.
func (m *models) find(name string) *modelEstimates {
	if e := m.byName[name]; e != nil {
		return e
	}
	return &m.all
}

// ensure returns the estimates of a model, new ones if it has none; nil if there are too many.
func (m *models) ensure(name string) *modelEstimates {
	e := m.byName[name]
	if e == nil && len(m.byName) < maxModels {
		e = &modelEstimates{ratio: newTokenRatio()}
		m.byName[name] = e
	}
	return e
}

func (m *models) addPrompt(name string, bytes, tokens int) {
	m.all.ratio.addPrompt(bytes, tokens)
	if e := m.ensure(name); e != nil {
		e.ratio.addPrompt(bytes, tokens)
	}
}

func (m *models) addUncached(name string, tokens float64) {
	m.all.uncached.Add(tokens)
	if e := m.ensure(name); e != nil {
		e.uncached.Add(tokens)
	}
}

// meanUncached returns the mean of the uncached tokens of a model's requests; 0 before the
// first of any model.
func (m *models) meanUncached(name string) float64 {
	if e := m.find(name); e.uncached.count > 0 {
		return e.uncached.Value
	}
	return m.all.uncached.Value
}
