package estimate

// minGain is the weight of one value in an average over a hundred values and more.
const minGain = 0.01

// Average follows a quantity that drifts. Its first hundred values count alike; after that it is exponential.
type Average struct {
	Value float64
	count float64 // of values; a prior counts as several
}

// NewAverage returns an average that starts at prior, which counts as weight values.
func NewAverage(prior, weight float64) Average { return Average{prior, weight} }

// Add adds a value.
func (a *Average) Add(x float64) {
	a.count++
	a.Value += max(minGain, 1/a.count) * (x - a.Value)
}
