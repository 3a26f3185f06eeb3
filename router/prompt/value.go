package prompt

import "strconv"

// named walks the object at i, which was checked, and notes in values where the
// members called names lie. Of equal keys the last counts, as it does for vLLM.
// It returns the index behind the object.
func (p *Prompt) named(i int, names []string, values []value) (int, error) {
	i++
	for {
		key, at, ok, err := p.scan.member(i)
		if !ok {
			return at, err
		}
		v, err := p.scan.value(at, checked)
		if err != nil {
			return 0, err
		}
		for k, written := 0, p.text(key); k < len(names); k++ {
			if string(written) == names[k] {
				values[k] = v
				break
			}
		}
		i = v.end
	}
}

// text returns the string v with its escapes undone, and any other value as it
// is written. The result is valid until the next call.
func (p *Prompt) text(v value) []byte {
	if p.scan.first(v) != '"' {
		return p.scan.b[v.start:v.end]
	}
	if !v.escaped {
		return p.scan.b[v.start+1 : v.end-1]
	}
	p.scratch, _, _ = p.scan.appendString(p.scratch[:0], v.start) // v was checked
	return p.scratch
}

// truthy reads a flag as vLLM does, which takes 1 and "true" for true.
func (p *Prompt) truthy(v value) bool {
	switch string(p.text(v)) {
	case "true", "True", "TRUE", "1", "1.0":
		return true
	}
	return false
}

// integer reads a whole number as vLLM does, which takes 2.0 and "2" for 2.
// What is no positive number is 0: the replica refuses it where it matters.
func (p *Prompt) integer(v value) int {
	written := p.text(v)
	if len(written) == 0 || len(written) > 32 {
		return 0
	}
	n, err := strconv.ParseFloat(string(written), 64)
	if err != nil || !(n > 0) {
		return 0
	}
	return int(min(n, 1<<31-1))
}
