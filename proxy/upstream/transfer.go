package upstream

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/proxy/fault"
	"warmroute/proxy/relay"
	"warmroute/router"
)

// Causes of failures of a split request.
var (
	ErrLateTransfer     = errors.New("the KV transfer took longer than half of disaggregation.kv_lease")
	ErrNoTransferParams = errors.New("the response to the prefill request has no kv_transfer_params: " +
		"start the replica with --kv-transfer-config, or set its role to both")
	ErrThinkingBudget = errors.New("the replica refused the prefill request of a request with thinking.budget_tokens: vLLM 0.33 " +
		"accepts it")
	ErrTransferParamsMemory = errors.New("no memory is left for the parameters of the KV transfer")
	ErrQuotesTransfer       = errors.New("the error response quotes the parameters of the KV transfer")
	errPrefillNotReady      = errors.New("the backend of the prefill request is not ready any more")
)

// KVTransfer is what a prefill request leaves for the decode request.
type KVTransfer struct {
	Prefill  *router.Reservation // of the prefill request; it has been released
	Took     time.Duration       // the prefill request
	EndedAt  time.Time           // when its response began
	NotAfter time.Time           // when the decode request may be sent at the latest
	Result   router.Outcome      // of the prefill request
	Member   string              // of the decode request's body, with a comma after it; empty: not needed any more
	Reserved int64               // bytes of Member that are reserved in relay.Buffers
	Address  []string            // host, port and engine id by which the KV cache is read, as the parameters have them
}

// CheckUsable returns the failure of a decode request that may not be sent any more, else nil.
func (t *KVTransfer) CheckUsable(now time.Time) *fault.Failure {
	f := &fault.Failure{Reason: metrics.RetryKVTransfer, IsFree: true, SameBackend: true}
	switch {
	case t.Prefill.Backend.State() != backends.Ready:
		f.Err, f.Split = errPrefillNotReady, metrics.SplitPrefillFailed
	case now.After(t.NotAfter):
		f.Err, f.Split = ErrLateTransfer, metrics.SplitLate
	default:
		return nil
	}
	return f
}

// CanDecodeOn reports whether b can do the decode request of the transfer: not of a nil one.
func (t *KVTransfer) CanDecodeOn(b *backends.Backend) bool {
	return t != nil && b.Options().Role != backends.RolePrefill && b.KVForm().PairsWith(t.Prefill.Backend.KVForm())
}

// KVTransferMember returns the member of a response with the parameters of a transfer, with a comma after it. It is as
// the replica on that host has written it, but for a host that only the replica itself can reach. ok is false if there
// are no such parameters.
func KVTransferMember(response []byte, host string) (member string, ok bool) {
	v := gjson.GetBytes(response, "kv_transfer_params")
	if !v.IsObject() || !gjson.Valid(v.Raw) || v.Get("do_remote_prefill").Type != gjson.True {
		return "", false
	}
	if ids := v.Get("remote_block_ids"); ids.Exists() && !strings.ContainsAny(ids.Raw, "0123456789") {
		return "", false // such a list ends the process of the replica that reads it
	}
	params := v.Raw
	if h := gjson.Get(params, "remote_host"); h.Index > 0 && h.Type == gjson.String && isLocalHost(h.Str) && !isLocalHost(host) {
		quoted, _ := json.Marshal(host)
		params = params[:h.Index] + string(quoted) + params[h.Index+len(h.Raw):]
	}
	return `"kv_transfer_params":` + params + ",", true
}

// TransferAddress returns the host, the port and the engine id in the member that KVTransferMember returns, of those that are long
// enough to be told from other text.
func TransferAddress(member string) (address []string) {
	_, params, _ := strings.Cut(strings.TrimSuffix(member, ","), ":")
	for _, name := range [...]string{"remote_host", "remote_port", "remote_engine_id"} {
		if v := gjson.Get(params, name).String(); len(v) >= minAddressBytes {
			address = append(address, strings.Clone(v))
		}
	}
	return address
}

// minAddressBytes is the length from which a host, a port or an engine id is looked for in errors.
const minAddressBytes = 4

// isLocalHost reports whether a name or an address means the machine itself, wherever it is used.
func isLocalHost(host string) bool {
	addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return strings.EqualFold(host, "localhost") || err == nil && (addr.IsLoopback() || addr.IsUnspecified())
}

// IsQuotedIn reports whether a text may have parameters of the transfer in it. Of a nil KVTransfer only their names are known.
func (t *KVTransfer) IsQuotedIn(text []byte) bool {
	quotes := func(word string) bool { return containsWord(text, word) }
	return slices.ContainsFunc(transferWords[:], quotes) || t != nil && slices.ContainsFunc(t.Address, quotes)
}

// transferWords are names of parameters of a transfer.
var transferWords = [...]string{"kv_transfer_params", "remote_host", "remote_port", "remote_engine_id", "engine_id"}

// containsWord reports whether text contains word, not as a part of a longer number or name.
func containsWord(text []byte, word string) bool {
	isWordByte := func(c byte) bool {
		return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_'
	}
	for from := 0; ; {
		i := bytes.Index(text[from:], []byte(word))
		if i < 0 {
			return false
		}
		begin, end := from+i, from+i+len(word)
		if (begin == 0 || !isWordByte(text[begin-1])) && (end == len(text) || !isWordByte(text[end])) {
			return true
		}
		from = begin + 1
	}
}

// Release frees the parameters. A nil KVTransfer has none.
func (t *KVTransfer) Release(buffers *relay.Buffers) {
	if t != nil {
		buffers.Release(t.Reserved)
		t.Member, t.Reserved = "", 0
	}
}
