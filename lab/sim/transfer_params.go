package sim

import (
	"net"
	"net/url"
	"strconv"

	"github.com/tidwall/gjson"
)

// transferParams are the kv_transfer_params of a request.
type transferParams struct {
	prefillRequest bool // do_remote_decode: the response tells where the KV of the prompt is
	decodeRequest  bool // do_remote_prefill: another replica has the KV of the prompt

	// Of a decode request. Without address the transfer fails.
	address         string // host and port of the other replica; "" if any required field is missing
	engineID        string // of the other replica
	requestID       string // of the prefill request there
	blocks          int    // number of its blocks
	cachedTokens    int    // of the prefill request, which usage reports
	hasCachedTokens bool
}

// parseTransferParams parses a kv_transfer_params, which may be missing or null.
func parseTransferParams(v gjson.Result) (transferParams, error) {
	var p transferParams
	if v.Type == gjson.Null {
		return p, nil
	}
	if !v.IsObject() {
		return p, validationError("body.kv_transfer_params", "Input should be a valid dictionary")
	}
	p.prefillRequest = v.Get("do_remote_decode").Bool()
	p.decodeRequest = v.Get("do_remote_prefill").Bool() && !p.prefillRequest
	if !p.decodeRequest {
		return p, nil
	}
	if cached := v.Get("remote_prefill_cached_tokens"); cached.Type == gjson.Number {
		p.cachedTokens, p.hasCachedTokens = int(max(0, cached.Int())), true
	}
	v.Get("remote_block_ids").ForEach(func(_, group gjson.Result) bool {
		p.blocks += len(group.Array())
		return true
	})
	p.engineID, p.requestID = v.Get("remote_engine_id").Str, v.Get("remote_request_id").Str
	port := v.Get("remote_port").Int()
	if p.engineID == "" || p.requestID == "" || port < 1 || port > 65535 || v.Get("tp_size").Int() < 1 {
		return p, nil
	}
	address := net.JoinHostPort(v.Get("remote_host").Str, strconv.FormatInt(port, 10))
	if u, err := url.Parse("http://" + address); err == nil && u.Host == address && u.Hostname() != "" {
		p.address = address
	}
	return p, nil
}

// formatTransferParams returns the kv_transfer_params of the response to a request that does not stream, of which
// sequences are the choices: null unless the first one is a prefill request whose blocks are pinned.
func (s *Server) formatTransferParams(sequences []*sequence) string {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	q := sequences[0]
	pinned := q.PinnedBlocks()
	if len(pinned) == 0 {
		return "null"
	}
	_, port, _ := net.SplitHostPort(s.address)
	b := []byte(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[`)
	for i, block := range pinned {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(block), 10)
	}
	return string(b) + `]],"remote_engine_id":"` + s.engineID + `","remote_request_id":"` + q.transferID +
		`","remote_host":"localhost","remote_port":` + port + `,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":` +
		strconv.Itoa(q.Prompt) +
		`,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":` + strconv.Itoa(q.Cached) + `}`
}
