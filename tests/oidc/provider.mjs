// A real provider of OpenID Connect for a test in a browser. Whoever types a name is let in under that name, with the role of this test.
//   node provider.mjs PORT
import { Provider } from "oidc-provider";

const port = process.argv[2];
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{
    client_id: "vm-operator", client_secret: "of-the-client", redirect_uris: ["https://of.no/matter"], response_types: ["code"], grant_types: ["authorization_code"],
  }],
  pkce: { required: () => true },
  claims: { openid: ["sub"], profile: ["name", "preferred_username", "roles"], email: ["email"] },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, preferred_username: id, name: `${id} of the lab`, email: `${id}@example.com`, roles: ["vm-users"] }),
  }),
  cookies: { keys: ["of a test"] },
  features: { devInteractions: { enabled: true } },
});
// The web interface of the test has a port that nobody knows before.
provider.Client.prototype.redirectUriAllowed = (uri) => uri.startsWith("http://127.0.0.1:") && uri.endsWith("/oauth/callback");
provider.Client.prototype.postLogoutRedirectUriAllowed = (uri) => uri.startsWith("http://127.0.0.1:") && uri.endsWith("/sign-in");
provider.listen(port, "127.0.0.1", () => console.log("listens"));
