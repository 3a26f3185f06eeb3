package prompt

// A request is split if one replica does its prefill and another one its decode. The body for the first asks for one
// token and for the parameters of the transfer; the body for the second has these parameters beside what the client
// sent. Neither is parsed again: Parse notes where the values are that change.

// Edit replaces a part of a body, body[Start:End], by Text.
type Edit struct {
	Start, End int
	Text       string
}

// maxEdits bounds the edits of a body: one in which a member stands more often is not split.
const maxEdits = 16

// remoteDecode asks a replica to keep the prompt's KV cache for another one.
const remoteDecode = `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null},`

// memberUse is what a top-level member is to a split.
type memberUse uint8

const (
	useNone    memberUse = iota
	setFalse             // in the body for the prefill
	setNull              // the same
	setZero              // the same
	setOne               // the same
	forbidTrue           // a request that has it as something else than false and null is not split
	forbidAny            // a request that has it is not split
)

// prefillValues are the values in the body for the prefill.
var prefillValues = [...]string{setFalse: "false", setNull: "null", setZero: "0", setOne: "1"}

// memberUseOf returns what the top-level member of that name is to a split.
func memberUseOf(key []byte) memberUse {
	switch string(key) {
	case "stream", "store":
		return setFalse
	case "stream_options":
		return setNull
	case "min_tokens":
		return setZero
	case "max_tokens", "max_completion_tokens", "max_output_tokens":
		return setOne
	case "use_beam_search", "background":
		return forbidTrue
	case "kv_transfer_params", "ec_transfer_params": // also null, since a body may name it once
		return forbidAny
	}
	return useNone
}

// split is what Parse notes for Splittable and AppendPrefillEdits.
type split struct {
	forbidden bool
	membersAt int    // index after the opening brace of the body
	edits     []Edit // reused by the next Parse
	has       [prefillInsertions]bool
}

// Members that the body for the prefill has in any case.
const (
	insertLimit = iota
	insertStore
	prefillInsertions
)

// noteMember notes a top-level member that was read.
func (p *Prompt) noteMember(f field, use memberUse, v value) {
	t := &p.split
	switch use {
	case useNone:
		return
	case forbidTrue:
		written := string(p.scan.b[v.start:v.end])
		t.forbidden = t.forbidden || written != "false" && written != "null"
		return
	case forbidAny:
		t.forbidden = true
		return
	}
	if len(t.edits) == maxEdits {
		t.forbidden = true
		return
	}
	t.edits = append(t.edits, Edit{v.start, v.end, prefillValues[use]})
	switch {
	case f == fieldStore:
		t.has[insertStore] = true
	case f == fieldMaxTokens, f == fieldMaxCompletionTokens && p.kind == Responses:
		t.has[insertLimit] = true
	}
}

// Splittable reports whether one replica may do the prefill of the request and another one its decode. Where an engine
// computes several sequences from the prompt, or one in several calls, only the first could read the transferred KV
// cache.
func (p *Prompt) Splittable() bool {
	switch p.kind {
	case Chat, Completion, Messages:
	case Responses:
		if p.hasTools && p.tools.builtIn {
			return false
		}
	default:
		return false
	}
	return !p.split.forbidden && p.TransferParams == "" && p.Sequences == 1 && p.Cacheable && !p.echo && !p.HasMedia()
}

// AppendPrefillEdits appends to dst the edits that make the body of a Splittable request the one for its prefill, in
// the order of the body.
func (p *Prompt) AppendPrefillEdits(dst []Edit) []Edit {
	t := &p.split
	insert := func(text string) { dst = append(dst, Edit{t.membersAt, t.membersAt, text}) }
	insert(remoteDecode)
	switch {
	case t.has[insertLimit]:
	case p.kind == Responses:
		insert(`"max_output_tokens":1,`)
	default:
		insert(`"max_tokens":1,`)
	}
	if p.kind == Responses && !t.has[insertStore] {
		insert(`"store":false,`) // else the replica would keep the response for good
	}
	return append(dst, t.edits...)
}

// MembersAt returns the index in the body at which a member, with a comma after it, can be inserted as the first one.
// The body of a Splittable request has members.
func (p *Prompt) MembersAt() int { return p.split.membersAt }

// HasThinkingBudget reports whether a Messages body limits the tokens of the reasoning. vLLM before 0.33 refuses a
// max_tokens of 1 beside it.
func (p *Prompt) HasThinkingBudget() bool {
	return p.kind == Messages && p.thinkingBudget
}
