package router

// averageGain is the weight of one value in an average that has seen a hundred.
const averageGain = 0.01

// average follows a quantity that drifts. Its first hundred values count alike,
// so that it is of use from the first one on.
type average struct {
	value float64
	seen  float64 // values so far; a prior counts as some
}

func (a *average) add(x float64) {
	a.seen++
	a.value += max(averageGain, 1/a.seen) * (x - a.value)
}
