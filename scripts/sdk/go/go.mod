module warmroute/scripts/sdk/go

go 1.26

require github.com/openai/openai-go/v3 v3.42.0 // the last version that takes an empty line without data for an event

require (
	github.com/tidwall/gjson v1.18.0 // indirect
	github.com/tidwall/match v1.1.1 // indirect
	github.com/tidwall/pretty v1.2.1 // indirect
	github.com/tidwall/sjson v1.2.5 // indirect
)
