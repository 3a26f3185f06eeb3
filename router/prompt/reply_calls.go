package prompt

// mostCallBytes bounds the name and arguments of a tool call that are kept until
// they are whole: only then is it known how templates write them.
const mostCallBytes = 16 << 10

// call is the tool call that an answer is making.
type call struct {
	number int // of the answer's calls, from 1; 0: none was begun
	name   []byte
	args   []byte
}

// calls reads the list of tool calls at i, or of parts of them. What is no list
// is a field that says nothing, or one not known.
func (r *Reply) calls(i int) (int, error) {
	s := &r.scan
	if s.at(i) != '[' {
		return r.absent(i)
	}
	i++
	for n := 1; ; n++ {
		at, ok, err := s.element(i)
		if !ok {
			return at, err
		}
		if s.at(at) != '{' {
			r.Lost()
			i, err = s.skip(at)
		} else {
			i, err = r.callPart(at, n)
		}
		if err != nil {
			return 0, err
		}
	}
}

// callPart reads one call at i, or a part of it. A part says in "index" which
// call it belongs to; one of a whole answer is the nth.
func (r *Reply) callPart(i, n int) (int, error) {
	s := &r.scan
	r.trace.calls = true
	var index, function value
	end := i + 1
	for {
		key, at, ok, err := s.member(end)
		if err != nil {
			return 0, err
		}
		if !ok {
			end = at
			break
		}
		v, err := s.value(at, checked)
		if err != nil {
			return 0, err
		}
		switch string(r.name(key)) {
		case "index":
			index = v
		case "function":
			function = v
		}
		end = v.end
	}
	if index.given() {
		n = r.small(index)
	}
	switch {
	case n == r.call.number+1:
		r.endCall()
		r.call.number = n
	case n == 0 || n != r.call.number:
		r.Lost() // a part of a call that has ended, or of none that there can be
	}
	if s.first(function) == '{' {
		r.function(function.start + 1)
	}
	return end, nil
}

// function reads the object whose brace is right before i; it was checked.
func (r *Reply) function(i int) {
	s := &r.scan
	for {
		key, at, ok, _ := s.member(i)
		if !ok {
			return
		}
		into := (*[]byte)(nil)
		switch string(r.name(key)) {
		case "name":
			into = &r.call.name
		case "arguments":
			into = &r.call.args
		}
		if into == nil || s.at(at) != '"' {
			i, _ = s.skip(at)
			continue
		}
		if *into, i, _ = s.appendString(*into, at); len(*into) > mostCallBytes {
			r.Lost()
		}
	}
}

// small reads the index of a call and returns the number of it; 0 for what is none.
func (r *Reply) small(v value) int {
	if d := r.scan.b[v.start]; v.end == v.start+1 && digit(d) {
		return int(d-'0') + 1
	}
	if v.end == v.start+2 && digit(r.scan.b[v.start]) && digit(r.scan.b[v.start+1]) {
		return int(r.scan.b[v.start]-'0')*10 + int(r.scan.b[v.start+1]-'0') + 1
	}
	return 0
}

// endCall writes a call that is whole.
func (r *Reply) endCall() {
	c := &r.call
	if c.number == 0 {
		return
	}
	r.text = append(append(r.text, markCall), c.name...)
	r.text = appendArguments(append(r.text, markArguments), c.args)
	*c = call{name: c.name[:0], args: c.args[:0]}
}
