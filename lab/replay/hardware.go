package replay

import (
	"time"

	"warmroute/lab/sim/engine"
)

// hardware is one or several GPUs and a model on them.
type hardware struct {
	name  string
	times engine.Config // of a step
}

// publishedHardware is what serves Llama 3.1 often. The H200's times are the defaults, which were measured with vLLM
// 0.26; the others follow from the data sheets of the GPUs. Prefill reached 0.7 of the H200's operations; less is
// assumed of smaller GPUs, with tensor parallelism and on the MI300X.
func publishedHardware() []hardware {
	llama8B := model{parameters: 8.03e9, layers: 32, hidden: 4096, kvHeads: 8}
	llama70B := model{parameters: 70.6e9, layers: 80, hidden: 8192, kvHeads: 8}
	return []hardware{
		{"H200, 8B", engine.Config{}.WithDefaults()},
		{"4 H100, 70B", llama70B.stepTimes(0.5*4*989e12, 4*3.35e12)},
		{"A100 80GB, 8B", llama8B.stepTimes(0.6*312e12, 2.039e12)},
		{"L40S, 8B", llama8B.stepTimes(0.6*362e12, 0.864e12)},
		{"MI300X, 70B", llama70B.stepTimes(0.4*1307e12, 5.3e12)},
	}
}

// model is a dense transformer in bf16.
type model struct {
	parameters     float64
	layers, hidden float64
	kvHeads        float64 // of 128 values for keys and as many for values
}

// stepTimes returns the times of a step on hardware that computes so many operations a second, without sparsity, and
// reads so many bytes a second. Each step reads all weights, with 0.8 of the bandwidth beside 0.9 ms for the scheduler
// and the starts of kernels, and the KV cache of all contexts. A prompt token takes two operations for each parameter,
// and four for each layer, hidden value and token before it. For the H200 this gives 5.1 ms, 3.3e-5 and 27 ns, where
// 5.07 ms, 2.8e-5 and 22.5 ns were measured.
func (m *model) stepTimes(operations, bandwidth float64) engine.Config {
	const bytesPerValue = 2
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	return engine.Config{
		StepTime:       seconds(m.parameters*bytesPerValue/(0.8*bandwidth) + 0.9e-3),
		PrefillRate:    operations / (2 * m.parameters),
		QuadraticDepth: 4 * m.layers * m.hidden / (2 * m.parameters),
		DecodeTime:     5 * time.Microsecond,
		ContextTime:    seconds(m.layers * 2 * m.kvHeads * 128 * bytesPerValue / bandwidth),
	}
}
